"""The processes of a run: launching ranks, their rendezvous and process group, and signals.

From a command to its ranks:
    started_ranks     whether torchrun or srun has started this process as a rank
    launcher          `launch`: runs a function here, on ranks that it starts, or as a rank that others started
    local_workers     starts ranks through torch's elastic `agent`; `rendezvous` joins several machines
    rank_reports      heartbeats and errors of ranks, and which one failed first
On a rank:
    process_group     `init_distributed`: device (`hardware`), process group and meshes, as a `DistributedContext`
    key_value_store   where ranks meet before they have a process group
    communicator      collectives on objects and numbers
    agreement         work on whose errors all ranks agree
    local_shard       this rank's part of a tensor
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
