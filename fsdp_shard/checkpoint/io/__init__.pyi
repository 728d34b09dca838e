from .atomicity import (
    allocate as allocate,
    make_directories as make_directories,
    new_directory as new_directory,
    recover as recover,
    require_space as require_space,
    start_writeback as start_writeback,
    sync_directories as sync_directories,
)
from .fault_points import fault_point as fault_point
from .files import (
    FileHeader as FileHeader,
    FilePool as FilePool,
    Files as Files,
    page_aligned as page_aligned,
    pread_into as pread_into,
    pwrite_all as pwrite_all,
    split_aligned as split_aligned,
)
from .members import (
    has_file as has_file,
    member as member,
    refuse_deleted as refuse_deleted,
    refuse_many_entries as refuse_many_entries,
)
from .safetensors_format import (
    CASTABLE as CASTABLE,
    PAGE_BYTES as PAGE_BYTES,
    PAGED_BYTES as PAGED_BYTES,
    Header as Header,
    TensorSpec as TensorSpec,
    build_header as build_header,
    find_torch_name as find_torch_name,
    from_torch_name as from_torch_name,
    is_known as is_known,
    itemsize as itemsize,
    kind_of as kind_of,
    main_dtype as main_dtype,
    read_header as read_header,
    to_torch as to_torch,
    torch_name as torch_name,
)
from .thread_pool import in_threads as in_threads
from .zip_crcs import Checksum as Checksum, ChecksumTracker as ChecksumTracker
