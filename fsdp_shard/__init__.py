"""fsdp-shard: fine-tune Hugging Face models under FSDP, keep their checkpoints, run inference from them.

    finetune, evaluate, generate       whole commands: settings in a list, figures in a dict
    open_checkpoint, convert, verify   checkpoints of any format
    load_dispatched                    a model of transformers over GPUs, CPU and disk
    Checkpointer                       checkpoints in a training loop of your own
    init_distributed, build_model, shard, load_weights, clip_grad_norm_, no_sync, save_pretrained
                                       a loop with a model that is sharded along its blocks

`help(fsdp_shard.NAME)` describes each. The other names in `__init__.pyi` are what recipes are written with. A name is
imported when it is first used, so that `import fsdp_shard` alone loads neither torch nor transformers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
