"""Fused kernels are refused by name where they cannot be or would have no effect; else all but the loss is used.

liger-kernel itself needs a GPU: a package of its name stands in for it, which notes what it is told.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config
from transformers.utils.import_utils import is_liger_kernel_available

from fsdp_shard.cli import load_recipe
from fsdp_shard.config import FinetuneConfig, PlanConfig, compose_jobs
from fsdp_shard.errors import ConfigError
from fsdp_shard.models import build_on_meta
from fsdp_shard.sharding import ShardConfig
from fsdp_shard.training.loss.fused_kernels import check_installed, check_kernels, check_known, use_kernels
from fsdp_shard.training.loss.linear_cross_entropy import use_loss_head
from tests.support.runs import RECIPES
from tests.support.tiny import llama, llama_config, token_batch

# As liger-kernel 0.8 has it, with a norm that computes what it says in torch.
STAND_IN = """
import types

calls = []


def norm(self, hidden):
    scale = (hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    return self.weight * hidden * scale


def apply_liger_kernel_to_llama(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True,
                                swiglu=True, model=None):
    calls.append({"cross_entropy": cross_entropy, "fused": fused_linear_cross_entropy, "rms_norm": rms_norm})
    if fused_linear_cross_entropy:
        model.forward = None
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.__dict__["forward"] = types.MethodType(norm, module)


def apply_liger_kernel_to_nothing(cross_entropy=True, model=None):
    calls.append({"cross_entropy": cross_entropy})


MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_liger_kernel_to_llama, "gpt2": apply_liger_kernel_to_nothing}
"""
INIT = """
import inspect
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known


def _apply_liger_kernel_to_instance(model, **kwargs):
    function = known[model.config.model_type]
    function(model=model, **{n: v for n, v in kwargs.items() if n in inspect.signature(function).parameters})
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the stand-in was told."""
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (tmp_path / "liger_kernel" / "__init__.py").write_text('__version__ = "0.8.5"\n')
    (package / "__init__.py").write_text(INIT)
    (package / "monkey_patch.py").write_text(STAND_IN)
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    is_liger_kernel_available.cache_clear()
    from liger_kernel.transformers import monkey_patch

    yield monkey_patch.calls
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        del sys.modules[name]
    is_liger_kernel_available.cache_clear()


def test_it_is_put_in_but_for_the_loss(calls: list[dict[str, Any]]) -> None:
    plain, fused = llama(), llama()
    check_kernels("liger", ShardConfig(), on_gpu=True)
    assert use_kernels(fused, "none") == 0
    assert calls == []
    assert use_kernels(fused, "liger") == 5  # two norms a layer, and the last one
    assert calls == [{"cross_entropy": False, "fused": False, "rms_norm": True}]
    assert "forward" not in fused.__dict__
    torch.testing.assert_close(fused(token_batch(0)).logits, plain(token_batch(0)).logits)
    meta = build_on_meta(llama_config(), "float32")
    assert use_kernels(meta, "liger") == 5
    assert use_loss_head(meta, True), "the loss in chunks is to be had with it"


def test_models_for_which_it_is_nothing(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=8)
    with pytest.raises(
        ConfigError, match=r"^model\.kernels=liger has no effect: liger-kernel changed no module of GPT2LMHeadModel"
    ):
        use_kernels(build_on_meta(config, "float32"), "liger")
    from transformers import BloomConfig

    with pytest.raises(ConfigError, match=r"^model\.kernels=liger has no effect: .* bloom, only for gpt2, llama\."):
        check_known(BloomConfig(), "liger")
    other = llama_config()
    other.hidden_act = "gelu"
    with pytest.raises(ConfigError, match=r"its activation is gelu, and liger-kernel's swiglu for llama has silu"):
        use_kernels(build_on_meta(other, "float32"), "liger")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(
        ConfigError, match=r"cannot be applied to llama: .* None in sys\.modules\. Set model\.kernels=none"
    ):
        check_known(llama_config(), "liger")


def test_machines_and_settings_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels("none", ShardConfig(tensor_parallel=2), on_gpu=False)
    with pytest.raises(ConfigError, match=r"model\.kernels=liger is for GPUs, .* on the CPU; set model\.kernels=none"):
        check_kernels("liger", ShardConfig(), on_gpu=False)
    monkeypatch.setattr("fsdp_shard.utils.environment.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs liger-kernel, which is not installed.*\[liger\]"):
        check_installed("liger")
    monkeypatch.setattr("fsdp_shard.utils.environment.find_spec", lambda name: object())
    check_installed("liger")
    for name, shard in {
        "tensor_parallel": ShardConfig(tensor_parallel=2),
        "expert_parallel": ShardConfig(expert_parallel=2),
    }.items():
        with pytest.raises(ConfigError, match=rf"cannot be combined with shard\.{name}=2"):
            check_kernels("liger", shard, on_gpu=True)


def test_the_commands_refuse_it(tmp_path: Path) -> None:
    given = ["model.path=org/name", "model.kernels=liger", f"run_dir={tmp_path}", "launch.device=cpu"]
    (job,) = compose_jobs(FinetuneConfig, [*given, "data.path=x.txt"], "fsdp-shard finetune")
    recipe = load_recipe(RECIPES / "finetune.py")
    with pytest.raises(ConfigError, match=r"model\.kernels=liger is for GPUs"):
        recipe.check(job.config)
    assert "model.kernels" in PlanConfig.unused
