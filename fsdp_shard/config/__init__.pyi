from .common import RunConfig as RunConfig, command_of as command_of, is_used as is_used
from .compose import Job as Job, compose_jobs as compose_jobs, write_config as write_config
from .convert import ConvertConfig as ConvertConfig
from .doctor import DoctorConfig as DoctorConfig
from .evaluate import EvaluateConfig as EvaluateConfig
from .finetune import FinetuneConfig as FinetuneConfig
from .generate import GenerateConfig as GenerateConfig
from .plan import PlanConfig as PlanConfig
from .registry import OPTIONS as OPTIONS
from .schemas import COMMANDS as COMMANDS, schema_of as schema_of
