from .accelerate import AcceleratorCheckpointer as AcceleratorCheckpointer
from .lightning import LightningCheckpoint as LightningCheckpoint
from .ray import ray_finetune as ray_finetune
from .resumable_loader import ResumableLoader as ResumableLoader
from .trainer import CheckpointerCallback as CheckpointerCallback
