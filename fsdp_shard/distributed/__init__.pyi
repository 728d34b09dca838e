from .agreement import (
    check_same_settings as check_same_settings,
    run_on_all as run_on_all,
    run_on_main as run_on_main,
)
from .communicator import (
    Communicator as Communicator,
    OnlyRank as OnlyRank,
    SilentCommunicator as SilentCommunicator,
    current_ranks as current_ranks,
    temporary_ranks as temporary_ranks,
)
from .config import (
    LONGEST_TIMEOUT_SECONDS as LONGEST_TIMEOUT_SECONDS,
    Launchable as Launchable,
    LaunchConfig as LaunchConfig,
)
from .hardware import (
    count_gpus as count_gpus,
    describe_missing_numactl as describe_missing_numactl,
    device_preset as device_preset,
    gpu_number as gpu_number,
    num_cores as num_cores,
    peak_flops as peak_flops,
    preset_of as preset_of,
)
from .key_value_store import is_restarted as is_restarted
from .launcher import (
    check_machine as check_machine,
    is_joined_rank as is_joined_rank,
    joined_rank as joined_rank,
    launch as launch,
    num_local_ranks as num_local_ranks,
    rendezvous_endpoint as rendezvous_endpoint,
    shares_memory as shares_memory,
    uses_gpus as uses_gpus,
    variables_for_torch as variables_for_torch,
    world_sizes as world_sizes,
)
from .local_shard import (
    LocalShard as LocalShard,
    is_first_copy as is_first_copy,
    shard_of as shard_of,
)
from .process_group import (
    DistributedContext as DistributedContext,
    context_groups as context_groups,
    init_distributed as init_distributed,
    join_ranks as join_ranks,
)
from .rendezvous import is_this_machine as is_this_machine
from .signals import (
    STOP_SIGNALS as STOP_SIGNALS,
    Stopped as Stopped,
    interrupt_on_signals as interrupt_on_signals,
    noting_ctrl_c as noting_ctrl_c,
    stop_signals as stop_signals,
)
from .started_ranks import (
    check_started as check_started,
    contradiction_of_srun as contradiction_of_srun,
    is_allocation_only as is_allocation_only,
    may_restart as may_restart,
)
