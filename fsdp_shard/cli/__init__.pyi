from .command_line import main as main, run_command as run_command
from .exit import run_as_program as run_as_program, start_garbage_collection as start_garbage_collection, tell as tell
from .recipes import Recipe as Recipe, load_recipe as load_recipe, recipe as recipe, run_jobs as run_jobs
