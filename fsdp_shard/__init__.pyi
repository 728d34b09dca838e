from .checkpoint import convert as convert, open_checkpoint as open_checkpoint, verify as verify
from .cli import evaluate as evaluate, finetune as finetune, generate as generate
from .distributed import init_distributed as init_distributed
from .inference import load_dispatched as load_dispatched
from .models import no_split_blocks as no_split_blocks
from .sharding import clip_grad_norm_ as clip_grad_norm_, no_sync as no_sync, shard as shard
from .training import (
    Checkpointer as Checkpointer,
    Restored as Restored,
    TrainingRun as TrainingRun,
    build_model as build_model,
    load_weights as load_weights,
    save_pretrained as save_pretrained,
    train as train,
)

__version__: str
