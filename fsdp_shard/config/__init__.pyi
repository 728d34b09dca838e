from .commands import (
    COMMANDS as COMMANDS,
    ConvertConfig as ConvertConfig,
    DoctorConfig as DoctorConfig,
    EvaluateConfig as EvaluateConfig,
    FinetuneConfig as FinetuneConfig,
    GenerateConfig as GenerateConfig,
    PlanConfig as PlanConfig,
    schema_of as schema_of,
)
from .compose import Job as Job, compose_jobs as compose_jobs, write_config as write_config
from .registry import OPTIONS as OPTIONS
from .run_config import RunConfig as RunConfig, command_of as command_of, is_used as is_used
