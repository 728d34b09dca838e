"""Beside libraries that do the same, where they are installed: the loss of a large vocabulary, and LoRA on nf4."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_shard.checkpoint import locate
from fsdp_shard.distributed import init_distributed
from fsdp_shard.models import QUANTIZATION_CODES, ModelConfig
from fsdp_shard.sharding import Fsdp2Config
from fsdp_shard.training import LoraConfig, linear_cross_entropy, load_sharded, train
from tests.gpu.child import Bench, in_turn
from tests.gpu.device import IS_REHEARSAL, open_device
from tests.gpu.loops import LR, Job, Measured, training_run
from tests.gpu.models import config_of, loaded_by_transformers, written

check = pytest.mark.check
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def _ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, None, labels, float(len(labels)))


def _liger(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: torch.Tensor = LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)
    return loss


def _torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = F.linear_cross_entropy(hidden, weight, labels)
    return loss


LOSSES: dict[str, Loss] = {"plain": _plain, "ours": _ours, "liger": _liger, "torch": _torch}


def loss_cost(name: str, shape: tuple[int, int, int]) -> tuple[float, int, tuple[torch.Tensor, ...]]:
    """Seconds and peak bytes of a loss and its gradients, and the loss and the gradients."""
    device = open_device()
    tokens, width, vocabulary = shape
    generator = torch.Generator(device.torch_device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device.torch_device, generator=generator).mul_(0.1).bfloat16().requires_grad_()

    hidden, weight = random(tokens, width), random(vocabulary, width)
    labels = torch.randint(0, vocabulary, (tokens,), device=device.torch_device, generator=generator)
    found: list[torch.Tensor] = []

    def step() -> None:
        hidden.grad = weight.grad = None
        loss = LOSSES[name](hidden, weight, labels)
        loss.backward()
        found.append(loss.detach())

    before = device.reset()
    seconds = device.seconds(step, 5)
    assert hidden.grad is not None
    assert weight.grad is not None
    return seconds, device.peak_bytes - before, (found[0], hidden.grad, weight.grad)


@check(seconds=60)
def test_the_loss_of_a_large_vocabulary(bench: Bench) -> None:
    shape = (64, 32, 512) if IS_REHEARSAL else (8192, 4096, 128_256)
    plain, ours = in_turn(*((loss_cost, name, shape) for name in ("plain", "ours")))
    others = {"plain": plain}
    if bench.has("loss beside liger", "liger_kernel") and not IS_REHEARSAL:
        try:
            (others["liger"],) = in_turn((loss_cost, "liger", shape))
        except Exception as error:  # of its own, such as a compiler that is missing
            bench.record("loss beside liger", None, note=str(error).splitlines()[-1])
    if hasattr(F, "linear_cross_entropy"):
        (others["torch"],) = in_turn((loss_cost, "torch", shape))
    else:
        bench.record("loss beside torch's", None, note=f"torch {torch.__version__} has no linear_cross_entropy")
    for name, (seconds, peak, _) in others.items():
        note = f"{ours[0] * 1000:.1f} ms, {ours[1] / 1e9:.2f} GB beside {seconds * 1000:.1f} ms, {peak / 1e9:.2f} GB"
        bench.record(f"seconds of the loss beside {name}", ours[0] / seconds, "x", note=note)
        bench.record(f"memory of the loss beside {name}", ours[1] / max(peak, 1), "x")
    names = {"loss": 1e-3, "gradient of the hidden states": 1e-2, "gradient of the head": 1e-2}
    for (name, limit), one, other in zip(names.items(), ours[2], plain[2], strict=True):
        apart = float((one.float() - other.float()).norm() / other.float().norm())
        bench.record(f"{name} beside the plain one", apart, "relative", at_most=limit, exact=True)


def our_qlora(path: Path, job: Job, steps: int) -> Measured:
    """Training of an adapter on a base in nf4."""
    device = open_device()
    with init_distributed(device.type, timeout_seconds=60) as context:
        adapter = LoraConfig(rank=16, quantize="nf4", target_modules=_TARGETS)
        settings = ModelConfig(path=str(path), dtype="bfloat16")
        loaded = load_sharded(settings, Fsdp2Config(), locate(str(path)), context, adapter)
        run = training_run(job, loaded.model, context)
        running = train(run)
        return _timed(lambda: next(running).loss, steps)


def bitsandbytes_qlora(path: Path, job: Job, steps: int) -> Measured:
    """The same by transformers, peft and bitsandbytes, in a bare loop."""
    import peft
    from transformers import BitsAndBytesConfig

    device = open_device()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = loaded_by_transformers(path, {"": 0}, quantization_config=quantization)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=16, lora_alpha=32, target_modules=_TARGETS)).train()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=LR, fused=True)
    data, numbers = job.data(), iter(range(1 << 30))

    def step() -> float:
        batch = data.batch([next(numbers)])
        inputs = {name: torch.from_numpy(value).to(device.torch_device) for name, value in batch.inputs.items()}
        logits = model(**inputs, use_cache=False).logits
        labels = torch.from_numpy(batch.labels).to(device.torch_device)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return _timed(step, steps)


def _timed(step: Callable[[], float], steps: int) -> Measured:
    device = open_device()
    losses = [step() for _ in range(1 if IS_REHEARSAL else 3)]
    device.reset()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(step())
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return Measured(statistics.median(seconds), losses, device.peak_bytes)


def decoding_speed(num_weights: int) -> float:
    """Bytes per second, read and written, of decoding nf4 to bfloat16."""
    device, code = open_device(), QUANTIZATION_CODES["nf4"]
    rows = code.encode(torch.randn(num_weights, device=device.torch_device))
    seconds = device.seconds(lambda: code.decode(rows, num_weights, torch.bfloat16), 20)
    return (rows.nbytes + 2 * num_weights) / seconds


@check(seconds=70)
def test_lora_on_nf4(bench: Bench) -> None:
    path, speed = in_turn(
        (written, bench.directory, "1.2B", None, bench.device.torch_device),
        (decoding_speed, bench.size(1 << 26, 1 << 10)),
    )
    bench.record("decoding of nf4, bytes read and written", speed / 1e9, "GB/s")
    length = bench.size(2048, 32)
    job = Job(config_of("1.2B"), length)
    (ours,) = in_turn((our_qlora, path, job, bench.size(6, 1)))
    about = f"{length / ours.seconds:,.0f} tokens/s, {ours.peak_bytes / 1e9:.2f} GB"
    if IS_REHEARSAL or not bench.has("nf4 LoRA beside bitsandbytes", "bitsandbytes"):
        bench.record("nf4 LoRA", length / ours.seconds, "tokens/s", note=f"{ours.peak_bytes / 1e9:.2f} GB")
        return
    bench.record("nf4 LoRA", length / ours.seconds, "tokens/s", note=f"{ours.peak_bytes / 1e9:.2f} GB")
    (peer,) = in_turn((bitsandbytes_qlora, path, job, 6))
    bench.record("speed of nf4 LoRA beside bitsandbytes", peer.seconds / ours.seconds, "x", at_least=0.8, note=about)
    bench.record("memory of nf4 LoRA beside bitsandbytes", ours.peak_bytes / peer.peak_bytes, "x", at_most=1.1)
