from . import errors as errors
from .checkpoint import (
    ConvertReport as ConvertReport,
    TensorIndex as TensorIndex,
    VerifyReport as VerifyReport,
    check_conversion as check_conversion,
    convert as convert,
    open_checkpoint as open_checkpoint,
    run_conversion as run_conversion,
    verify as verify,
)
from .cli import (
    evaluate as evaluate,
    finetune as finetune,
    generate as generate,
    plan as plan,
    push_converted as push_converted,
    push_to_hub as push_to_hub,
    recipe as recipe,
)
from .config import (
    ConvertConfig as ConvertConfig,
    DoctorConfig as DoctorConfig,
    EvaluateConfig as EvaluateConfig,
    FinetuneConfig as FinetuneConfig,
    GenerateConfig as GenerateConfig,
    PlanConfig as PlanConfig,
    compose_config as compose_config,
    write_config as write_config,
)
from .distributed import (
    DistributedContext as DistributedContext,
    init_distributed as init_distributed,
    join_ranks as join_ranks,
)
from .evaluation import check_evaluation as check_evaluation, run_evaluation as run_evaluation
from .inference import (
    check_checkpoint as check_checkpoint,
    check_generation as check_generation,
    complete_prompts as complete_prompts,
    load_dispatched as load_dispatched,
)
from .models import no_split_blocks as no_split_blocks
from .planning import check_plan as check_plan, plan_run as plan_run
from .sharding import (
    ShardedModel as ShardedModel,
    clip_grad_norm_ as clip_grad_norm_,
    no_sync as no_sync,
    shard as shard,
)
from .training import (
    Checkpointer as Checkpointer,
    HeldOutEvaluator as HeldOutEvaluator,
    Restored as Restored,
    TrainingRun as TrainingRun,
    add_reference as add_reference,
    build_model as build_model,
    build_optimizer as build_optimizer,
    build_unfilled as build_unfilled,
    check_finetune as check_finetune,
    finish_run as finish_run,
    load_weights as load_weights,
    open_data as open_data,
    open_log as open_log,
    open_run as open_run,
    open_saver as open_saver,
    save_pretrained as save_pretrained,
    start_run as start_run,
    train as train,
)
from .utils import write_result as write_result

__version__: str
