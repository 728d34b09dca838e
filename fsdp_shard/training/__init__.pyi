from .batch_loader import micro_batches as micro_batches
from .checkpoints.background_saver import BackgroundSave as BackgroundSave
from .checkpoints.checkpointer import (
    Checkpointer as Checkpointer,
    Restored as Restored,
    check_settings as check_settings,
)
from .checkpoints.checkpointer_document import (
    random_state as random_state,
    restore_random_state as restore_random_state,
)
from .checkpoints.recorded_settings import (
    read_settings as read_settings,
    settings_changed_since as settings_changed_since,
)
from .checkpoints.resume import (
    check_optimizer as check_optimizer,
    find_step as find_step,
    is_finished as is_finished,
    read_trainer as read_trainer,
)
from .checkpoints.resume_report import describe_finished as describe_finished
from .checkpoints.run_lock import LOCK as LOCK, RunLock as RunLock, holder as holder, lock_directory as lock_directory
from .checkpoints.saver import FinetuneSaver as FinetuneSaver, RunContent as RunContent
from .config import TrainConfig as TrainConfig, num_micro_batches as num_micro_batches
from .dataset_figures import data_figures as data_figures, describe_streams as describe_streams
from .finetune_checks import (
    check_architecture as check_architecture,
    check_combination as check_combination,
    check_finetune as check_finetune,
    check_trained as check_trained,
)
from .held_out.evaluator import HeldOutEvaluator as HeldOutEvaluator, evaluate_loss as evaluate_loss
from .load_model import (
    LoadedModel as LoadedModel,
    LoadFigures as LoadFigures,
    check_adapter_mesh as check_adapter_mesh,
    load_sharded as load_sharded,
)
from .logging.metrics_log import (
    EVALUATIONS as EVALUATIONS,
    METRICS as METRICS,
    SAMPLES as SAMPLES,
    of_last_held_out as of_last_held_out,
    read_lines as read_lines,
    read_rows as read_rows,
)
from .logging.run_log import RunLog as RunLog
from .loop import StepReport as StepReport, TrainingRun as TrainingRun, train as train
from .loss.cross_entropy import (
    cross_entropy as cross_entropy,
    cross_entropy_chunk_bytes as cross_entropy_chunk_bytes,
)
from .loss.custom_functions import (
    CustomFunctions as CustomFunctions,
    StepSums as StepSums,
)
from .loss.device_batch import DeviceBatch as DeviceBatch, PackedAnswers as PackedAnswers
from .loss.distillation import Targets as Targets, TopTokens as TopTokens, split_targets as split_targets
from .loss.forward_loss import forward_answers as forward_answers
from .loss.linear_cross_entropy import (
    head_returns_loss as head_returns_loss,
    linear_cross_entropy as linear_cross_entropy,
    use_loss_head as use_loss_head,
)
from .loss.row_values import LOSS_CHUNK_BYTES as LOSS_CHUNK_BYTES
from .model_identity import check_base_model as check_base_model
from .model_origin import (
    NewHead as NewHead,
    RunStart as RunStart,
    build_model as build_model,
    check_classifier as check_classifier,
    collect_model_files as collect_model_files,
    data_task as data_task,
    decoder_start as decoder_start,
    model_source as model_source,
    origin_config as origin_config,
)
from .module_weights import load_weights as load_weights, save_pretrained as save_pretrained
from .objectives.dispatched_model import dispatched_rows as dispatched_rows
from .objectives.distill import DistillConfig as DistillConfig
from .objectives.objective import ForwardPass as ForwardPass, ObjectiveConfig as ObjectiveConfig
from .objectives.objective_checks import check_task as check_task
from .objectives.reference_model import (
    ModelReference as ModelReference,
    PrecomputedReference as PrecomputedReference,
    add_reference as add_reference,
)
from .objectives.registry import OBJECTIVES as OBJECTIVES
from .objectives.teachers.teacher_checks import check_teacher_config as check_teacher_config
from .optim.adamw8bit import AdamW8bitConfig as AdamW8bitConfig
from .optim.build import build_optimizer as build_optimizer
from .optim.config import OptimConfig as OptimConfig
from .optim.ema import WeightAverage as WeightAverage
from .optim.muon import MuonConfig as MuonConfig
from .optim.registry import OPTIMIZERS as OPTIMIZERS
from .optim.torch_optim import AdamWConfig as AdamWConfig, SgdConfig as SgdConfig
from .optim.whole_param_optimizer import update_rounds as update_rounds
from .peft.config import PRINCIPAL as PRINCIPAL, AdapterConfig as AdapterConfig, LoraConfig as LoraConfig
from .peft.disable_adapters import adapters_disabled as adapters_disabled
from .peft.earlier_adapter import check_planned as check_planned
from .peft.eva import new_pca as new_pca, run_watching as run_watching
from .peft.initial_values import MAGNITUDE_CHUNK_BYTES as MAGNITUDE_CHUNK_BYTES
from .peft.lora import Adapter as Adapter, check_continues as check_continues, inject_lora as inject_lora
from .peft.principal import principal_factors as principal_factors
from .peft.qlora import quantize_base as quantize_base
from .run_setup import (
    build_unfilled as build_unfilled,
    finish_run as finish_run,
    open_data as open_data,
    open_log as open_log,
    open_run as open_run,
    open_saver as open_saver,
    run_files as run_files,
    start_run as start_run,
)
from .sample_length import describe_lengths as describe_lengths, settle_run_length as settle_run_length
from .trainer_state import TrainerState as TrainerState
