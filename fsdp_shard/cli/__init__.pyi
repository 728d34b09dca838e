from .command_line import main as main, run_command as run_command
from .exit import print_error as print_error, run_as_program as run_as_program
from .from_python import evaluate as evaluate, finetune as finetune, generate as generate, plan as plan
from .push_command import push_converted as push_converted, push_to_hub as push_to_hub
from .run_recipe import Recipe as Recipe, load_recipe as load_recipe, recipe as recipe
