"""task=speed: what is timed is what `generate` does, for every size that fits; how long it takes is not tested."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fsdp_shard.checkpoint import Location, convert
from fsdp_shard.config import EvaluateConfig, compose_jobs
from fsdp_shard.errors import ConfigError
from fsdp_shard.evaluation.config import EvaluateSettings, SpeedConfig
from fsdp_shard.evaluation.evaluation_base import EvaluationBase
from fsdp_shard.evaluation.report.comparison import build_report
from fsdp_shard.evaluation.report.same_weights import WeightDigests
from fsdp_shard.evaluation.speed_task.speed import open_speed, sizes_within
from fsdp_shard.inference import DispatchConfig, KVCacheBudget, OnPlan, dispatch_model
from fsdp_shard.models import ContextLength, kv_cache_of, load_config
from tests.support.runs import Ended, run_recipe
from tests.support.tiny import byte_tokenizer, llama

SIZES = ("speed.batch_sizes=[1,3]", "speed.context_lengths=[5,20]", "speed.new_tokens=4", "speed.repeats=2")
RATES = ("prefill_tokens_per_second", "decode_tokens_per_second", "decode_tokens_per_second_per_text")
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def run_speed(run_dir: Path, model: Path, *overrides: str) -> Ended:
    return run_recipe("evaluate", run_dir, "task=speed", f"checkpoint={model}", *overrides)


@pytest.fixture(scope="module")
def of_directory(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run on the Hugging Face directory."""
    ended = run_speed(tmp_path_factory.mktemp("speed") / "run", tiny_model, *SIZES, "seed=3")
    assert ended.status == 0, ended.err
    return ended


def check_rows(result: dict[str, Any]) -> None:
    sizes = [(row["batch_size"], row["context_length"]) for row in result["speed"]]
    assert sizes == [(1, 5), (1, 20), (3, 5), (3, 20)]
    for row in result["speed"]:
        assert row["num_prompt_tokens"] == row["batch_size"] * row["context_length"]
        assert row["num_new_tokens"] == row["batch_size"] * 4
        for name in ("first_token_seconds", *RATES):
            low, high = row[f"{name}_range"]
            assert 0 < low <= row[name] <= high < math.inf
        assert row["decode_tokens_per_second"] == pytest.approx(
            row["batch_size"] * row["decode_tokens_per_second_per_text"]
        )
        assert row["peak_memory_bytes"]["cpu"] > 1 << 20
        assert row["disk_bytes_per_pass"] >= 0
    for name in RATES[:2]:
        assert result[name] == max(row[name] for row in result["speed"])
    assert result["first_token_seconds"] == min(row["first_token_seconds"] for row in result["speed"])


def test_rows_table_and_plot(of_directory: Ended) -> None:
    result = of_directory.result
    check_rows(result)
    assert result["left_out"] == []
    assert set(result["weights_bytes"]) == {"cpu"}
    assert result["kv_cache_bytes"] == {"cpu": 3 * 24 * 2 * 2 * 12 * 4}  # the largest size, layers, keys and values
    provenance = result["provenance"]
    assert provenance["weights"]["digest"]
    assert provenance["seed"] == 3
    assert provenance["machine"]["num_threads"] == torch.get_num_threads()
    assert "batch_size" not in provenance["settings"]
    assert provenance["settings"]["dispatch"]["prefetch_blocks"] == 2
    assert "4 new tokens each for 4 sizes of batch and prompt, measured 2 times after one time that is not counted" in (
        of_directory.out
    )
    table = [line.split()[:2] for line in of_directory.out.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert table == [["1", "5"], ["1", "20"], ["3", "5"], ["3", "20"]]
    plot = ElementTree.parse(of_directory.run_dir / "speed.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(plot.findall(f"{space}g")) == 4
    assert [len(group.findall(f"{space}circle")) for group in plot.findall(f"{space}g")] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("form", "overrides"),
    [
        ("ranks", ()),
        ("dcp", ()),
        ("directory", ("dispatch.device_map=disk",)),
        pytest.param("directory", ("dispatch.quantize=int8",), marks=needs_torchao, id="int8"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_every_form_of_the_same_weights(
    of_directory: Ended, tiny_model: Path, tmp_path: Path, form: str, overrides: tuple[str, ...]
) -> None:
    source, given = tmp_path / form, list(overrides)
    if form == "ranks":
        convert(tiny_model, source, format="sharded", ranks=2)
    elif form == "dcp":
        convert(tiny_model, source, format="dcp")
    else:
        source = tiny_model
    ended = run_speed(tmp_path / "run", source, *SIZES, "seed=3", *given)
    assert ended.status == 0, ended.err
    check_rows(ended.result)
    tokens = [[row["new_tokens_digest"] for row in one.result["speed"]] for one in (ended, of_directory)]
    weights, whole = (one.result["weights_bytes"] for one in (ended, of_directory))
    if "dispatch.quantize=int8" in overrides:
        assert weights["cpu"] < whole["cpu"]
        return
    assert tokens[0] == tokens[1]
    assert sum(weights.values()) == whole["cpu"]
    assert weights.get("disk", 0) > 0 if overrides else weights == whole
    assert bool(ended.result["streaming_bytes"]) == bool(overrides)


def test_a_pass_is_that_of_generate(tmp_path: Path) -> None:
    """A model that would end each text at once, as every token ends one, generates as many tokens as are asked for."""
    model = llama(5)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(257))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    speed = SpeedConfig(batch_sizes=[2], context_lengths=[9], new_tokens=5, repeats=2)
    settings = EvaluateSettings(checkpoint=str(tmp_path / "model"), task="speed", speed=speed)
    inputs: list[torch.Tensor] = []
    cache_lengths: list[int] = []
    reserved: list[KVCacheBudget | None] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        inputs.append(kwargs["input_ids"].clone())
        cache_lengths.extend(cache.get_seq_length() for cache in kv_cache_of(output).values())

    def load(source: Location, kv_cache: KVCacheBudget | None = None, on_plan: OnPlan | None = None) -> PreTrainedModel:
        reserved.append(kv_cache)
        loaded = dispatch_model(
            source, load_config(source.config_directory), DispatchConfig("cpu"), kv_cache, on_plan=on_plan
        )
        loaded.register_forward_hook(record, with_kwargs=True)
        return loaded

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    (row,) = open_speed(EvaluationBase(settings, tmp_path / "run", 7, tokenizer)).measure(load).row["speed"]
    assert reserved == [KVCacheBudget(2, 14)]
    assert [tuple(ids.shape) for ids in inputs] == [(2, 9), *[(2, 1)] * 4] * 3  # one pass is not counted
    assert cache_lengths == [9, 10, 11, 12, 13] * 3
    assert all(torch.equal(ids, inputs[at % 5]) for at, ids in enumerate(inputs))
    prompts = inputs[0]
    assert prompts.unique().numel() > 9
    assert 256 not in prompts, "a special token"

    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain.generation_config.eos_token_id = None
    tokens = plain.generate(prompts, max_new_tokens=5, do_sample=False, pad_token_id=0)[:, 9:]
    assert [int(ids[0]) for ids in inputs[1:5]] == tokens[0, :4].tolist()
    assert row["new_tokens_digest"] == xxhash.xxh3_128_hexdigest(tokens.numpy().tobytes())


def test_sizes_beyond_the_context_are_left_out(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("speed.batch_sizes=2", "speed.context_lengths=[124,125]", "speed.new_tokens=4", "speed.repeats=1")
    ended = run_speed(tmp_path / "run", tiny_model, *sizes)
    assert ended.status == 0, ended.err
    said = "with 4 new tokens it exceeds the model's context of 128 tokens"
    assert f"left out: batch 2, context 125: {said}" in ended.out
    assert ended.result["left_out"] == [{"batch_size": 2, "context_length": 125, "reason": said}]
    assert [row["context_length"] for row in ended.result["speed"]] == [124]


def test_sizes_beyond_memory_are_left_out(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("speed.batch_sizes=[1,64]", "speed.context_lengths=100", "speed.new_tokens=2", "speed.repeats=1")
    budget = "dispatch.max_memory={cpu: 1MB}"
    ended = run_speed(tmp_path / "run", tiny_model, *sizes, budget)
    assert ended.status == 0, ended.err
    assert [row["batch_size"] for row in ended.result["speed"]] == [1]
    (left_out,) = ended.result["left_out"]
    assert left_out["batch_size"] == 64
    assert re.search(r"gives 977 KiB on cpu.* 1.20 MiB of it for the KV cache", left_out["reason"]), left_out["reason"]
    assert f"left out: batch 64, context 100: {left_out['reason']}" in ended.out
    ended = run_speed(tmp_path / "none", tiny_model, *sizes[1:], "speed.batch_sizes=64", budget)
    assert ended.status == 2
    assert left_out["reason"] in ended.err
    assert not (tmp_path / "none" / "result.json").exists()


def test_the_lengths_that_nobody_gives() -> None:
    speed = SpeedConfig(batch_sizes=[1])
    for length, used, others in ((None, [128, 1024], []), (1055, [128], [1024]), (100, [68], [128, 1024])):
        sizes, left_out = sizes_within(speed, ContextLength(length))
        assert [size.context_length for size in sizes] == used
        assert [one.size.context_length for one in left_out] == others
    with pytest.raises(ConfigError, match=r"new_tokens=32 leaves no room .* context of 32 tokens; give at most 31"):
        sizes_within(speed, ContextLength(32))


def test_a_report_has_the_sizes(of_directory: Ended) -> None:
    report = build_report([str(of_directory.run_dir)], WeightDigests())
    (table,) = report.tables
    assert table.key == "generation-speed"
    rows = of_directory.result["speed"]
    assert [[cell.value for cell in row[3:6]] for row in table.rows] == [
        [row["batch_size"], row["context_length"], row["first_token_seconds"]] for row in rows
    ]
    assert str(table.rows[0][2].value).startswith("cpu ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["data.path=a.txt"],
            r"data\.path=a\.txt is for task=perplexity, classification, reward or generation, not speed",
        ),
        (["perplexity.by=documents"], r"perplexity\.by=documents is for task=perplexity, not speed"),
        (["lm_eval.limit=3"], r"lm_eval\.limit=3 is for task=lm_eval, not speed"),
        (["against=b"], r"against=b is for task=perplexity, not speed"),
        (["stride=4"], r"stride=4 is for task=perplexity, not speed"),
        (
            ["batch_size=4"],
            r"batch_size=4 is for task=perplexity, lm_eval, classification, reward or generation, not",
        ),
        (["speed.new_tokens=1"], r"speed\.new_tokens=1 is out of range: it must be at least 2"),
        (["speed.repeats=0"], r"speed\.repeats=0 is out of range"),
        (["speed.batch_sizes=[]"], r"speed\.batch_sizes=\[\] is not a list of whole numbers"),
        (["speed.batch_sizes=null"], r"speed\.batch_sizes=None names no size"),
        (["speed.batch_sizes=[1,0]"], r"speed\.batch_sizes=\[1, 0\] is not a list of whole numbers"),
        (["speed.context_lengths=[1.5]"], r"speed\.context_lengths=\[1\.5\] is not a list of whole numbers"),
        (["speed.context_lengths=long"], r"speed\.context_lengths=long is not a list of whole numbers"),
        (["speed.context_lengths=[true]"], r"speed\.context_lengths=\[True\] is not a list of whole numbers"),
    ],
)
def test_settings_that_do_not_fit(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose_jobs(EvaluateConfig, ["checkpoint=x", "task=speed", *overrides], "fsdp-shard evaluate")


def test_settings_of_speed_are_for_it_alone() -> None:
    for task in (["data.path=a.txt"], ["task=lm_eval", "lm_eval.tasks=a"]):
        with pytest.raises(ConfigError, match=r"speed\.repeats=5 is for task=speed, not "):
            compose_jobs(EvaluateConfig, ["checkpoint=x", *task, "speed.repeats=5"], "fsdp-shard evaluate")


def test_prompts_beyond_the_context_are_an_error(tiny_model: Path, tmp_path: Path) -> None:
    ended = run_speed(tmp_path / "run", tiny_model, "speed.context_lengths=[128]")
    assert ended.status == 2
    assert "speed.context_lengths=[128] with speed.new_tokens=32 exceeds the model's context of 128 tokens" in ended.err
    assert "give prompts of at most 96" in ended.err
    assert ended.err.count("error: ") == 1
