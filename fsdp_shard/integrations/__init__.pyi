from .accelerate import AcceleratorCheckpointer as AcceleratorCheckpointer
from .lightning import LightningCheckpoint as LightningCheckpoint, ResumableLoader as ResumableLoader
from .ray import ray_finetune as ray_finetune
from .trainer import CheckpointerCallback as CheckpointerCallback
