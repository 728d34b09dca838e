"""Shards a model over ranks along its no-split blocks: FSDP2, FSDP1, DDP, tensor and expert parallelism.

The plan, from the model's structure alone:
    wrap_policy       which modules become units; `forward_trace` finds parameters that are used elsewhere
    rank_counts       how the settings divide the ranks into shards, replicas and data ranks
The wrappers, a file each, chosen by `registry`:
    fsdp2, fsdp1, ddp; `prepare_model` has the steps common to them
Before a wrapper:
    tensor_parallel, expert_parallel, context_parallel/ divide layers, experts and sequences
    activation_checkpointing recomputes blocks; activations/ has its selective kind, and activation offload
A sharded model:
    module_shards     this rank's shards of it, for checkpoints
    gradients         clipping, and backward passes without reduction
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
