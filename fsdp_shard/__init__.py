"""fsdp-shard: fine-tune Hugging Face models under FSDP, manage their checkpoints, and run inference from them.

    finetune, evaluate, generate, plan
                                       the commands: they take a list of settings and return a dict of figures
    open_checkpoint, convert, verify   checkpoints of any format
    load_dispatched                    a transformers model spread over GPUs, CPU and disk
    Checkpointer                       checkpoints in your own training loop
    init_distributed, build_model, shard, load_weights, clip_grad_norm_, no_sync, save_pretrained
                                       your own training loop, with a model sharded along its blocks

`help(fsdp_shard.NAME)` describes each name. Most other names in `__init__.pyi` are the building blocks of recipes.
Names are imported on first use, so `import fsdp_shard` alone loads neither torch nor transformers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
