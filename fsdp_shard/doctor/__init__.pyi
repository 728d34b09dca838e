from .findings import Report as Report
from .machine import hardware as hardware, software as software
from .rank_probe import ranks as ranks
from .run import data as data, memory as memory, plan_of as plan_of, room as room, settings as settings
from .storage import disk as disk, remote as remote, run_directory as run_directory
