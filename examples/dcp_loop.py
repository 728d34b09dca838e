"""A plain `fully_shard` loop with torch's own checkpoints, as in the DCP tutorial; it does not use fsdp_shard.

torchrun --nproc-per-node 2 examples/dcp_loop.py CHECKPOINT_TO_LOAD|- CHECKPOINT_TO_SAVE MODEL_DIRECTORY [STEPS]

    fsdp-shard convert source=CHECKPOINT target=MODEL config=MODEL_DIRECTORY       # its output, as a model for any tool
    fsdp-shard convert source=MODEL target=CHECKPOINT format=dcp nest=app.model    # its input, weights only
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


class AppState(Stateful):
    """Model and optimizer under the keys `model` and `optim`; the model alone without an optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizers = model, [optimizer] if optimizer else []

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optim": optim} if self.optimizers else {"model": model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        optim = state.get("optim", {})
        set_state_dict(self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=optim)


def main(loaded: str, saved: str, source: str, num_steps: int = 3) -> None:
    """Load weights, train, save weights and optimizer."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if loaded != "-":
        dcp.load({"app": AppState(model)}, checkpoint_id=loaded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        ids = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    loaded, saved, source, *numbers = sys.argv[1:]
    main(loaded, saved, source, *map(int, numbers))
    # A thread of gloo that frees its last tensors while Python exits would abort the process (torch 2.13).
    sys.stdout.flush()
    os._exit(0)
