"""ZeRO checkpoints that DeepSpeed itself wrote are what its engine and its own script gather, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_shard.checkpoint.conversion import convert
from fsdp_shard.checkpoint.location import open_checkpoint
from fsdp_shard.checkpoint.torch_pickle import read_torch_file
from fsdp_shard.errors import CheckpointError
from tests.checkpoint.files import assert_refused, assert_same
from tests.support.commands import free_port
from tests.support.deepspeed_layout import save_zero

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed's own
]
_ROOT = Path(__file__).resolve().parents[3]
KINDS = [
    (1, "bf16"),
    (2, "bf16"),
    (2, "fp32"),
    (3, "bf16"),
    (1, "bf16_masters"),
    (3, "bf16_masters"),
    (1, "bf16_optimizer"),
]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    """The directory of each kind, written by two processes of DeepSpeed."""
    root, port = tmp_path_factory.mktemp("zero"), str(free_port())
    kinds = [f"{stage}-{dtype}" for stage, dtype in KINDS]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.deepspeed_writer", str(root)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, *kinds], cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=200)
            assert rank.returncode == 0, output.decode()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    return {(stage, dtype): root / f"{stage}-{dtype}" for stage, dtype in KINDS}


def by_deepspeed(path: Path) -> dict[str, torch.Tensor]:
    """What `zero_to_fp32` gathers: float32, without tied names."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(path))
    return {name: tensor.contiguous() for name, tensor in found.items() if name != "head.weight"}


def by_engine(path: Path) -> dict[str, torch.Tensor]:
    """What the engine gathers before it ends: master weights, which it gives in float32, and frozen weights."""
    found: dict[str, torch.Tensor] = torch.load(f"{path}.bin")
    is_half = path.name.endswith("masters")
    kept = {name: tensor.bfloat16() if is_half else tensor for name, tensor in found.items()}
    return {**kept, "scale": torch.arange(4.0), "count": torch.arange(3)}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_zero_to_fp32(saves: dict[tuple[int, str], Path], kind: tuple[int, str]) -> None:
    if kind[1] == "bf16_optimizer":
        pytest.skip("zero_to_fp32 does not read the files of BF16_Optimizer")
    expected = by_deepspeed(saves[kind])
    assert ("frozen.weight" in expected) == (kind[0] > 1)  # of stage 1, it leaves out what is not trained
    with open_checkpoint(saves[kind]) as index:
        for name, tensor in expected.items():
            assert torch.equal(index.read(name).to(tensor.dtype), tensor), name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_the_engine(saves: dict[tuple[int, str], Path], kind: tuple[int, str], tmp_path: Path) -> None:
    expected = by_engine(saves[kind])
    for path in (saves[kind], saves[kind] / "global_step1"):
        with open_checkpoint(path) as index:
            assert (index.format, index.step, index.world_size) == ("deepspeed", 1, 2)
            assert_same(index, expected)
            assert index.aliases == {"head.weight": "embed.weight"}
            assert index.dtypes["a.weight"] == ("BF16" if kind[1] == "bf16_masters" else "F32")
            assert index.extras["optimizer"].num_tensors == 12  # 3 of AdamW, for 2 groups on 2 ranks
    convert(saves[kind], tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as index:
        assert_same(index, expected)


def test_a_universal_checkpoint_is_refused(saves: dict[tuple[int, str], Path], tmp_path: Path) -> None:
    made = tmp_path / "run" / "global_step1_universal"
    command = [sys.executable, "-W", "ignore", "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder"]
    inner = saves[2, "bf16"] / "global_step1"
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    options = ["--output_folder", str(made), "--inject_missing_state", *workers]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run([*command, str(inner), *options], check=True, capture_output=True, env=environment)
    for path in (made, made.parent):
        assert_refused(path, "global_step1_universal is a universal checkpoint of DeepSpeed")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layouts_of_tests_are_those_of_deepspeed(
    saves: dict[tuple[int, str], Path], stage: int, tmp_path: Path
) -> None:
    """The keys and kinds of values of `tests/support/deepspeed_layout.py` are in DeepSpeed's own files."""
    state = {"embed.weight": torch.ones(7, 5), "frozen.weight": torch.ones(3, 9)}
    made = save_zero(tmp_path / "run", state, stage, frozen=["frozen.weight"], ties={"head.weight": "embed.weight"})
    for file in made.iterdir():
        real = read_torch_file(saves[stage, "bf16"] / "global_step1" / file.name)
        compare_kinds(read_torch_file(file), real, file.name)


def compare_kinds(made: Any, real: Any, where: str) -> None:
    """Require each value of `made` to be of the kind that `real` has there, except DeepSpeed's own classes."""
    if isinstance(made, dict) and isinstance(real, dict):
        for key in made.keys() - {"zero_stage", "param_slice_mappings"}:
            assert key in real, (where, key)
            compare_kinds(made[key], real[key], f"{where}: {key}")
        return
    assert type(made) is type(real), (where, made, real)
    if isinstance(made, list) and made and real:
        compare_kinds(made[0], real[0], where)


def zero(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def changed(change: Callable[[dict[str, Any]], object], name: str) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        state = torch.load(path / name, weights_only=False)
        change(state)
        torch.save(state, path / name)

    return apply


def swapped(one: str, other: str) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        (path / one).rename(path / "between")
        (path / other).rename(path / one)
        (path / "between").rename(path / other)

    return apply


MODEL = "mp_rank_00_model_states.pt"
DAMAGES: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "no rank 0": (2, lambda p: (p / zero(0)).unlink(), "optimizer file of rank 0 is missing"),
    "no rank 1": (2, lambda p: (p / zero(1)).unlink(), "files of 1 rank, but was written by 2 ranks"),
    "two of a rank": (2, lambda p: shutil.copy(p / zero(1), p / zero(1)[5:]), "two files of rank 1"),
    "tensor parallel": (
        2,
        lambda p: shutil.copy(p / zero(1), p / zero(1).replace("00", "01")),
        "tensor or pipeline parallelism",
    ),
    "another stage": (
        3,
        lambda p: shutil.copy(p.parents[1] / "2-bf16/global_step1" / zero(1), p / zero(1)),
        "of ZeRO stage 2 .* but of ZeRO stage 3 ",
    ),
    "no model": (2, lambda p: (p / MODEL).unlink(), "file with the model states of rank 0 is missing"),
    "no model of a rank": (
        3,
        lambda p: (p / f"zero_pp_rank_1_{MODEL}").unlink(),
        "file with the model states of rank 1 is missing",
    ),
    "a parameter more": (
        2,
        changed(lambda s: s["param_shapes"][0].update(x=torch.Size([40])), MODEL),
        "other groups of parameters",
    ),
    "a larger parameter": (
        2,
        changed(lambda s: s["param_shapes"][0].update({"a.weight": torch.Size([90, 5])}), MODEL),
        "tensor a.weight of shape .* is not whole|b.weight",
    ),
    "a smaller parameter": (
        3,
        changed(lambda s: s["param_shapes"][0].update({"a.weight": torch.Size([2, 5])}), f"zero_pp_rank_0_{MODEL}"),
        "these are files of different saves",
    ),
    "no shapes": (2, changed(lambda s: s.pop("param_shapes"), MODEL), "no shapes of parameters"),
    "no partitions": (
        2,
        changed(lambda s: s["optimizer_state_dict"].pop("single_partition_of_fp32_groups"), zero(1)),
        "does not say how",
    ),
    "a parameter in two groups": (
        2,
        changed(lambda s: s["param_shapes"][1].update({"a.weight": s["param_shapes"][1].pop("a.bias")}), MODEL),
        "do not have the same parameters in group 1",
    ),
    "a parameter that is frozen too": (
        2,
        changed(
            lambda s: [
                s[f"frozen_param_{key}"].update({"a.weight": value})
                for key, value in (("shapes", torch.Size([9, 5])), ("fragments", torch.zeros(9, 5)))
            ],
            MODEL,
        ),
        "names parameter a.weight twice",
    ),
    "a buffer that is a parameter": (
        2,
        changed(lambda s: s["buffer_names"].append("a.weight"), MODEL),
        "names parameter a.weight twice",
    ),
    "parameters in another order": (
        2,
        changed(lambda s: s["param_shapes"][0].move_to_end("a.weight"), MODEL),
        "do not have the same parameters in group 0",
    ),
    "ranks swapped": (2, swapped(zero(0), zero(1)), "optimizer file of rank 0 do not have the same parameters"),
    "a buffer of another value": (
        3,
        changed(lambda s: s["module"]["scale"].add_(1), f"zero_pp_rank_1_{MODEL}"),
        "different values of tensor scale",
    ),
    "a rank of another step": (
        3,
        changed(lambda s: s.update(global_steps=7), f"zero_pp_rank_1_{MODEL}"),
        "the step is 7, but 1 in",
    ),
    "an optimizer of another step": (
        2,
        changed(lambda s: s["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].add_(1), zero(1)),
        "different values of tensor 0.step of the optimizer",
    ),
    "a list": (2, lambda p: torch.save([1], p / MODEL), "not the state of a DeepSpeed engine"),
    "a rank cut short": (2, lambda p: (p / zero(1)).write_bytes((p / zero(1)).read_bytes()[:3000]), "cut short"),
    "a link outside": (
        2,
        lambda p: ((p / MODEL).rename(p.parents[1] / "elsewhere"), (p / MODEL).symlink_to(p.parents[1] / "elsewhere")),
        "outside the directory",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_is_refused(saves: dict[tuple[int, str], Path], name: str) -> None:
    stage, damage, message = DAMAGES[name]
    source = saves[stage, "bf16"]
    root = source.parent / name.replace(" ", "_") / "global_step1"
    shutil.copytree(source / "global_step1", root)
    damage(root)
    assert_refused(root, message)


def test_latest_leads_nowhere_outside(saves: dict[tuple[int, str], Path], tmp_path: Path) -> None:
    shutil.copytree(saves[2, "bf16"], tmp_path / "run")
    (tmp_path / "run" / "global_step1").rename(tmp_path / "global_step1")
    (tmp_path / "run" / "latest").write_text("../global_step1")
    with pytest.raises(CheckpointError, match="no checkpoint that fsdp-shard reads"):
        open_checkpoint(tmp_path / "run")
