"""The settings of train.* and optim.*: what is refused, the learning rate's curve, and what is decayed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from fsdp_shard.data import DataConfig
from fsdp_shard.errors import ConfigError
from fsdp_shard.training.config import TrainConfig, check_held_out, num_micro_batches
from fsdp_shard.training.optim.lr_schedule import learning_rate
from fsdp_shard.training.optim.parameter_groups import is_decayed
from fsdp_shard.training.optim.torch_optim import AdamWConfig
from fsdp_shard.utils import check
from tests.support.tiny import llama


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TrainConfig(steps=0), "steps=0"),
        (TrainConfig(steps=100, epochs=3.0), "steps=100 and epochs=3 both say how long to train"),
        (TrainConfig(epochs=0.0), "epochs=0.0"),
        (TrainConfig(epochs=math.inf), "epochs=inf"),
        (TrainConfig(epochs=1.0, patience=2), "patience=2 needs evaluations"),
        (TrainConfig(global_batch_size=6, micro_batch_size=4), "global_batch_size=4 or 8 would fit"),
        (TrainConfig(global_batch_size=2, micro_batch_size=4), "the least that fits is 4"),
        (TrainConfig(steps=3, warmup_steps=4), "warmup_steps=4 is not less than steps=3"),
        (TrainConfig(steps=3, warmup_steps=3), "warmup_steps=3 is not less than steps=3, .* Set it to at most 2"),
        (TrainConfig(power=2.0), "power=2.0 has no effect with schedule=cosine; it is for schedule=polynomial"),
        (TrainConfig(final_lr_fraction=0.1, schedule="constant"), "final_lr_fraction=0.1 has no effect"),
        (
            TrainConfig(schedule="warmup_stable_decay", steps=10, warmup_steps=4, decay_steps=7),
            "decay_steps=7 is more than the 6 steps",
        ),
        (TrainConfig(max_grad_norm=0.0), "max_grad_norm=0.0"),
        (TrainConfig(tracker_project="x"), "tracker_project=x needs trackers that have projects"),
        (TrainConfig(tracker_project="x", trackers=["tensorboard"]), "tracker_project=x needs trackers"),
        (TrainConfig(schedule="cosin"), "did you mean cosine"),
        (AdamWConfig(lr=0.0), "lr=0.0"),
        (AdamWConfig(betas=[0.9]), "betas="),
        (AdamWConfig(betas=[0.9, 1.0]), "betas="),
    ],
)
def test_what_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config)


def test_good_settings_pass() -> None:
    check(TrainConfig(max_grad_norm=None, eval_windows=None))
    check(AdamWConfig())


@pytest.mark.parametrize(
    ("epochs", "num_samples", "batch_size", "steps"),
    [
        (3, 10, 5, 6),
        (3.0, 10, 4, 8),
        (0.5, 9, 4, 2),
        (0.01, 10, 4, 1),
        (1.1, 10, 1, 11),  # 1.1 * 10 is 11.000000000000002
        (0.7, 3_000_000_000, 7, 300_000_000),
    ],
)
def test_the_steps_of_epochs(epochs: float, num_samples: int, batch_size: int, steps: int) -> None:
    config = TrainConfig(epochs=epochs, global_batch_size=batch_size)
    check(config)
    known = config.for_data(num_samples)
    assert known.num_steps == steps
    assert known.for_data(num_samples, 1, batch_size).num_steps == steps, "resumed"
    assert [learning_rate(known, 1.0, step) for step in (0, steps)] == [1.0, 0.0]
    with pytest.raises(ValueError, match="depend on the data"):
        _ = config.num_steps


def test_a_run_that_goes_on_with_other_batches_trains_the_same_epochs() -> None:
    config = TrainConfig(epochs=3, global_batch_size=2)
    assert config.for_data(10, step=3, num_samples=12).num_steps == 3 + 9
    assert config.for_data(10, step=9, num_samples=36).num_steps == 9, "more than that are trained already"


def test_steps_do_not_depend_on_the_data() -> None:
    assert [TrainConfig().for_data(size, 3, 24).num_steps for size in (None, 5, 10**9)] == [100, 100, 100]
    assert TrainConfig(steps=7).for_data(1000).num_steps == 7


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": 8}, r"train\.warmup_steps=8 is not less than train\.epochs=3, which is 8 steps, so"),
        ({"profile": [9]}, r"steps go from 1 to train\.epochs=3, which is 8 steps"),
        ({"patience": 1, "eval_every": 8}, r"none before the last of 8 steps"),
        ({"schedule": "warmup_stable_decay", "decay_steps": 9}, r"decay_steps=9 is more than the 8 steps"),
    ],
)
def test_what_does_not_fit_the_steps_of_epochs(settings: dict[str, Any], words: str) -> None:
    config = TrainConfig(epochs=3, global_batch_size=4, **settings)
    check(config)
    assert config.for_data(12).num_steps == 9
    with pytest.raises(ConfigError, match=words):
        config.for_data(10)


def test_epochs_need_data_that_has_them() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs=3 needs data with a known number.*set train\.steps"):
        TrainConfig(epochs=3).for_data(None)


def test_the_batch_must_fit_the_ranks() -> None:
    config = TrainConfig(global_batch_size=8, micro_batch_size=2)
    for num_ranks in (1, 2, 4):
        num_micro_batches(config, num_ranks)
    with pytest.raises(ConfigError) as caught:
        num_micro_batches(config, 3)
    assert str(caught.value) == (
        "train.global_batch_size=8 is not divisible by train.micro_batch_size=2 x 3 data-parallel ranks = 6; "
        "train.global_batch_size=6 or 12 would fit."
    )
    with pytest.raises(ConfigError, match="the least that fits is 16"):
        num_micro_batches(config, 8)


@pytest.mark.parametrize("warmup", [0, 5, 19])
@pytest.mark.parametrize(
    ("ours", "theirs", "extra"),
    [
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "cosine", "final_lr_fraction": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"schedule": "cosine_with_restarts", "num_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        ({"schedule": "polynomial", "power": 2.5}, "polynomial", {"power": 2.5, "lr_end": 0.0}),
        (
            {"schedule": "polynomial", "power": 2.0, "final_lr_fraction": 0.1},
            "polynomial",
            {"power": 2.0, "lr_end": 0.03},
        ),
        ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
        ({"schedule": "warmup_stable_decay"}, "warmup_stable_decay", {"num_decay_steps": 2}),
        ({"schedule": "warmup_stable_decay", "decay_steps": 0}, "warmup_stable_decay", {"num_decay_steps": 0}),
        ({"schedule": "constant"}, "constant_with_warmup", {}),
    ],
)
def test_the_learning_rate_is_that_of_transformers(
    warmup: int, ours: dict[str, Any], theirs: str, extra: dict[str, float]
) -> None:
    if warmup == 19 and extra.get("num_decay_steps"):
        extra = {"num_decay_steps": 1}  # warm-up leaves no more
    config = TrainConfig(steps=20, warmup_steps=warmup, **ours)
    check(config)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(theirs, optimizer, warmup, 20, scheduler_specific_kwargs=extra)
    for step in range(20):
        assert learning_rate(config, 0.3, step) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_linear_ends_at_its_floor() -> None:
    config = TrainConfig(steps=10, schedule="linear", final_lr_fraction=0.25)
    assert [learning_rate(config, 1.0, step) for step in (0, 5, 10, 99)] == [1.0, 0.625, 0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (4, 4), True),
        ("model.embed_tokens.weight", (4, 4), True),
        ("model.layers.0.input_layernorm.weight", (4,), False),
        ("transformer.h.0.attn.c_attn.bias", (12,), False),
        ("odd.bias", (4, 4), False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 32), False),
        ("group_norm.weight", (4, 4), False),
        ("normalizer.layers.0.weight", (4, 4), True),
        ("scale", (), False),
    ],
)
def test_what_is_decayed(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_decayed(name, shape) is expected


def test_groups_follow_logical_shapes_and_leave_frozen_parameters_out() -> None:
    """FSDP1 keeps a rank's part of a matrix as a vector, and may keep none of it: the shapes given decide."""
    model = llama()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    flat = {name: torch.nn.Parameter(parameter.detach().flatten()[:3]) for name, parameter in model.named_parameters()}
    frozen = "model.layers.0.mlp.up_proj.weight"
    flat[frozen].requires_grad_(False)
    optimizer = AdamWConfig(lr=0.1, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.2).build(flat, shapes)
    assert isinstance(optimizer, torch.optim.AdamW)
    decayed, others = optimizer.param_groups
    names = {id(parameter): name for name, parameter in flat.items()}
    assert {names[id(p)] for p in decayed["params"]} == {n for n, s in shapes.items() if len(s) == 2} - {frozen}
    assert {names[id(p)] for p in others["params"]} == {n for n, s in shapes.items() if len(s) == 1}
    for group, decay in ((decayed, 0.2), (others, 0.0)):
        assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.95), 1e-6)
        assert group["weight_decay"] == decay
        assert group["fused"] is True


def test_fused_is_honored() -> None:
    parameters = {"weight": torch.nn.Parameter(torch.zeros(2, 2))}
    assert not AdamWConfig(fused=False).build(parameters, {"weight": (2, 2)}).param_groups[0]["fused"]


def test_each_held_out_set_has_a_window() -> None:
    sets = {"a": {"path": "a"}, "b": {"path": "b"}}
    data = DataConfig(path="train.txt", eval_sets=sets)
    check_held_out(TrainConfig(eval_windows=2, eval_every=2), data)
    with pytest.raises(ConfigError, match=r"train\.eval_windows=1 leaves no window for some of the 2 sets"):
        check_held_out(TrainConfig(eval_windows=1, eval_every=2), data)
