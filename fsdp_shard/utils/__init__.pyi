from .cache_dir import user_cache as user_cache
from .environment import set_environment as set_environment
from .package_data import configs as configs, recipes as recipes, shipped as shipped
from .process_memory import (
    device_peak_bytes as device_peak_bytes,
    disk_bytes_read as disk_bytes_read,
    give_back_free_memory as give_back_free_memory,
    keep_freed_memory as keep_freed_memory,
    peak_resident_bytes as peak_resident_bytes,
)
from .result_file import RESULT as RESULT, write_result as write_result
from .secrets import redact as redact
from .settings import (
    REQUIRED as REQUIRED,
    check as check,
    check_one as check_one,
    nearest as nearest,
    setting as setting,
    walk as walk,
    warnings_of as warnings_of,
)
from .sizes import format_size as format_size, parse_size as parse_size
