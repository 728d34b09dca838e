from .data_check import check_data as check_data
from .disk import check_disk as check_disk, check_disk_space as check_disk_space
from .findings import Report as Report
from .machine import check_hardware as check_hardware, check_software as check_software
from .process_environment import check_environment as check_environment
from .rank_probe import check_ranks as check_ranks
from .run_checks import (
    check_memory as check_memory,
    check_remote as check_remote,
    check_run_directory as check_run_directory,
    check_settings as check_settings,
    plan_run as plan_run,
    prepare_samples as prepare_samples,
)
