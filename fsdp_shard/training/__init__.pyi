from .checkpoints.resume import (
    check_optimizer as check_optimizer,
    find_step as find_step,
    is_finished as is_finished,
    open_trainer as open_trainer,
    read_trainer as read_trainer,
    restore_optimizer as restore_optimizer,
    verify_resumed as verify_resumed,
)
from .checkpoints.run_lock import LOCK as LOCK, check_free as check_free, holder as holder, run_lock as run_lock
from .checkpoints.saver import Flight as Flight, Saver as Saver, open_saver as open_saver
from .config import (
    OptimConfig as OptimConfig,
    TrainConfig as TrainConfig,
    check_batch as check_batch,
    check_held_out as check_held_out,
)
from .logging.loss_plot import check_plots as check_plots
from .logging.mfu import utilization as utilization
from .logging.profiler import StepProfiler as StepProfiler
from .logging.run_log import RunLog as RunLog, stopped as stopped
from .logging.trackers import check_trackers as check_trackers, public_settings as public_settings
from .loop import StepReport as StepReport, evaluate_loss as evaluate_loss, train as train
from .loss.cross_entropy import cross_entropy as cross_entropy
from .loss.fused_kernels import check_kernels as check_kernels
from .loss.linear_cross_entropy import (
    CHUNK_BYTES as CHUNK_BYTES,
    giving_loss as giving_loss,
    linear_cross_entropy as linear_cross_entropy,
    use_loss_head as use_loss_head,
)
from .model_setup import (
    LoadedModel as LoadedModel,
    LoadFigures as LoadFigures,
    build_optimizer as build_optimizer,
    check_model as check_model,
    data_task as data_task,
    describe as describe,
    load_sharded as load_sharded,
    model_source as model_source,
    side_files as side_files,
)
from .optim.adafactor import AdafactorConfig as AdafactorConfig
from .optim.adamw import AdamWConfig as AdamWConfig
from .optim.adamw8bit import AdamW8bitConfig as AdamW8bitConfig
from .optim.lr_schedule import is_due as is_due
from .optim.muon import MuonConfig as MuonConfig
from .optim.sgd import SgdConfig as SgdConfig
from .optim.whole_param_optimizer import assign_owners as assign_owners
from .peft.config import AdapterConfig as AdapterConfig, LoraConfig as LoraConfig
from .peft.lora import check_continues as check_continues, inject as inject
from .peft.qlora import quantize_base as quantize_base
from .seeding import deterministic_algorithms as deterministic_algorithms
from .stop_signal import StopSignal as StopSignal
from .trainer_state import TrainerState as TrainerState
