from .atomic_write import (
    ERROR as ERROR,
    RESULT as RESULT,
    atomic_directory as atomic_directory,
    check_writable as check_writable,
    fsync_path as fsync_path,
    has_content as has_content,
    hold_lock as hold_lock,
    is_abandoned as is_abandoned,
    name_in_errors as name_in_errors,
    nearest_existing as nearest_existing,
    try_lock as try_lock,
    write_atomically as write_atomically,
    write_file as write_file,
    write_result as write_result,
)
from .bounded_read import (
    open_regular as open_regular,
    other_content as other_content,
    parse_json as parse_json,
    read_bounded as read_bounded,
    read_json as read_json,
    read_range as read_range,
)
from .environment import (
    install_command as install_command,
    installed_versions as installed_versions,
    missing_file_system as missing_file_system,
    no_cudnn_attention as no_cudnn_attention,
    one_thread as one_thread,
    require_package as require_package,
    set_environment as set_environment,
    user_cache as user_cache,
)
from .file_limits import (
    Limits as Limits,
    exceeded as exceeded,
    limits as limits,
    refuse_excess as refuse_excess,
)
from .limited_process import (
    LimitedProcess as LimitedProcess,
    is_out_of_memory as is_out_of_memory,
    run_limited as run_limited,
)
from .module_tensors import replace_tensors as replace_tensors
from .package_data import configs as configs, recipes as recipes, render_page as render_page, shipped as shipped
from .partitioning import balanced_partition as balanced_partition
from .printing import make_output_printable as make_output_printable, only_errors_of as only_errors_of, say as say
from .process_memory import (
    device_peak_bytes as device_peak_bytes,
    disk_bytes_read as disk_bytes_read,
    empty_pages as empty_pages,
    give_back_free_memory as give_back_free_memory,
    keep_freed_memory as keep_freed_memory,
    lock_pages as lock_pages,
    peak_resident_bytes as peak_resident_bytes,
    reset_device_peak as reset_device_peak,
    reset_peak_resident_bytes as reset_peak_resident_bytes,
    resident_bytes as resident_bytes,
)
from .secrets import redact as redact, redact_setting as redact_setting
from .settings import (
    REQUIRED as REQUIRED,
    Parsed as Parsed,
    changed_settings as changed_settings,
    check as check,
    check_one as check_one,
    free_text as free_text,
    in_yaml as in_yaml,
    prose as prose,
    refuse_changed as refuse_changed,
    setting as setting,
    walk as walk,
    warnings_of as warnings_of,
)
from .text import (
    first_few as first_few,
    first_line as first_line,
    format_count as format_count,
    format_number as format_number,
    format_size as format_size,
    format_table as format_table,
    json_digest as json_digest,
    matches_any as matches_any,
    nearest as nearest,
    num_common as num_common,
    parse_size as parse_size,
    printable as printable,
)
from .torch_private import (
    DataDependentOutputException as DataDependentOutputException,
    FakeTensorMode as FakeTensorMode,
    TorchDispatchMode as TorchDispatchMode,
    changes_arguments as changes_arguments,
    fake_store as fake_store,
    flat_parameter_shards as flat_parameter_shards,
    free_flat_parameters as free_flat_parameters,
    hides_originals as hides_originals,
    hybrid_shard_grad_op as hybrid_shard_grad_op,
    in_backward as in_backward,
    initialize_fsdp2 as initialize_fsdp2,
    int8_matmul as int8_matmul,
    is_costly_operator as is_costly_operator,
    is_faking as is_faking,
    keep_batch_norms_wrapped as keep_batch_norms_wrapped,
    local_shape_and_offset as local_shape_and_offset,
    non_persistent_buffers as non_persistent_buffers,
    num_storage_users as num_storage_users,
    persistent_buffers as persistent_buffers,
    pin_flat_parameters as pin_flat_parameters,
    record_memory_history as record_memory_history,
    reshard_over as reshard_over,
    restore_frozen_parameters as restore_frozen_parameters,
    storage_key as storage_key,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    uncompiled as uncompiled,
    version as version,
    view_base as view_base,
    without_fakes as without_fakes,
)
from .work_progress import report_progress as report_progress
