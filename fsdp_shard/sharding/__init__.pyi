from .activation_checkpointing import (
    clean_fqn as clean_fqn,
    keeps_results as keeps_results,
    recompute_blocks as recompute_blocks,
    recomputed_fqns as recomputed_fqns,
)
from .config import ShardConfig as ShardConfig, ShardedModel as ShardedModel
from .ddp import DdpConfig as DdpConfig
from .fsdp1 import Fsdp1Config as Fsdp1Config
from .fsdp2 import Fsdp2Config as Fsdp2Config
from .registry import WRAPPERS as WRAPPERS, shard as shard
from .shard_sizes import Shape as Shape, itemsize as itemsize
from .tensor_parallel import (
    RUN_ONLY_STYLES as RUN_ONLY_STYLES,
    check_plan as check_plan,
    divide_layers as divide_layers,
    part_of as part_of,
    split_groups as split_groups,
)
from .wrap_policy import plan_units as plan_units
from .wrap_report import explain as explain
