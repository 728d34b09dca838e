from .command_configs import (
    COMMANDS as COMMANDS,
    OPTIONS as OPTIONS,
    ConvertConfig as ConvertConfig,
    DoctorConfig as DoctorConfig,
    EvaluateConfig as EvaluateConfig,
    FinetuneConfig as FinetuneConfig,
    GenerateConfig as GenerateConfig,
    PlanConfig as PlanConfig,
    RunConfig as RunConfig,
    command_of as command_of,
    is_used as is_used,
)
from .compose import (
    Job as Job,
    compose_config as compose_config,
    compose_jobs as compose_jobs,
    refuse_flags as refuse_flags,
)
from .config_file import not_writable as not_writable, write_config as write_config
from .nested_run_dirs import refuse_nested as refuse_nested
from .reference import help_text as help_text
