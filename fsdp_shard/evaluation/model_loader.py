"""How the tasks of an evaluation load a model: only once they need it, and again for a second one."""

from typing import Protocol

from transformers import PreTrainedModel

from fsdp_shard.checkpoint import Location
from fsdp_shard.inference import KVCacheBudget, OnPlan


class LoadModel(Protocol):
    """Loads a model."""

    def __call__(
        self, source: Location, kv_cache: KVCacheBudget | None = None, on_plan: OnPlan | None = None
    ) -> PreTrainedModel:
        """Load the model in `source`; the other arguments are those of `dispatch_model`."""
        ...
