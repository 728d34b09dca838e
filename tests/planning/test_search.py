"""Settings that would fit: each that is advised is composed from a command line, planned, and fits; some train."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    T5Config,
)

from fsdp_shard.config import PlanConfig, compose_jobs
from fsdp_shard.errors import InputError
from fsdp_shard.models import ModelConfig
from fsdp_shard.planning import (
    Fitting,
    HostMemory,
    PlannedRun,
    Planner,
    advise,
    chosen_settings,
    switched_off,
)
from fsdp_shard.planning.search.advice import Candidate
from fsdp_shard.planning.search.candidate_changes import memory_savers
from fsdp_shard.planning.search.make_planner import planned_hardware, planner_for
from fsdp_shard.planning.search.pareto_front import Front, Point, search_front
from fsdp_shard.sharding import DdpConfig, Fsdp1Config, Fsdp2Config
from fsdp_shard.training import OBJECTIVES, AdamWConfig, DistillConfig, TrainConfig
from fsdp_shard.utils import parse_size
from tests.support.live_bytes import measure_run
from tests.support.runs import run_recipe
from tests.support.sampled import sampled
from tests.support.tiny import llama_config

MODELS: dict[str, PretrainedConfig] = {
    "llama_8b": LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192,
    ),
    "llama_70b": LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192,
    ),
    "mistral_7b": MistralConfig(architectures=["MistralForCausalLM"]),
    "mixtral_8x7b": MixtralConfig(architectures=["MixtralForCausalLM"], max_position_embeddings=32768),
    "t5_3b": AutoConfig.for_model(
        "t5", architectures=["T5ForConditionalGeneration"], d_model=1024, d_kv=128, d_ff=16384, num_layers=24,
        num_heads=32, vocab_size=32128, decoder_start_token_id=0,
    ),
    "gpt2_xl": GPT2Config(architectures=["GPT2LMHeadModel"], n_embd=1600, n_layer=48, n_head=25),
    "qwen3_30b": AutoConfig.for_model(
        "qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, vocab_size=151_936,
    ),
}  # fmt: skip

# Model, memory of a GPU, and what the user types.
CASES: list[tuple[str, str, str]] = [
    ("gpt2_xl", "8GB", "launch.ranks=1"),
    ("gpt2_xl", "16GB", "launch.ranks=1 data.sequence_length=1024"),
    ("gpt2_xl", "24GB", "launch.ranks=1 train.micro_batch_size=8 data.sequence_length=1024"),
    ("gpt2_xl", "12GB", "launch.ranks=4 train.micro_batch_size=2 data.sequence_length=1024"),
    ("gpt2_xl", "24GB", "shard=ddp launch.ranks=2 data.sequence_length=512"),
    ("gpt2_xl", "16GB", "shard=fsdp1 launch.ranks=2 data.sequence_length=1024"),
    ("gpt2_xl", "8GB", "adapter=lora launch.ranks=1 data.sequence_length=1024"),
    ("gpt2_xl", "16GB", "objective=dpo launch.ranks=2 data.sequence_length=1024"),
    ("gpt2_xl", "16GB", "shard.reshard_after_forward=false launch.ranks=4 train.micro_batch_size=2"),
    ("gpt2_xl", "24GB", "train.ema_decay=0.999 launch.ranks=1 data.sequence_length=512"),
    ("t5_3b", "40GB", "model.task=seq2seq launch.ranks=1 data.sequence_length=512"),
    ("t5_3b", "24GB", "model.task=seq2seq launch.ranks=2 data.sequence_length=512"),
    ("t5_3b", "16GB", "model.task=seq2seq launch.ranks=4 data.sequence_length=512 train.micro_batch_size=2"),
    ("t5_3b", "40GB", "model.task=seq2seq shard=ddp launch.ranks=4 data.sequence_length=512"),
    ("t5_3b", "12GB", "model.task=seq2seq launch.ranks=8 data.sequence_length=1024"),
    ("t5_3b", "24GB", "model.task=seq2seq optim=adafactor launch.ranks=1 data.sequence_length=512"),
    ("mistral_7b", "80GB", "launch.ranks=1 data.sequence_length=2048"),
    ("mistral_7b", "40GB", "launch.ranks=4 data.sequence_length=4096"),
    ("mistral_7b", "60GB", "launch.ranks=2 data.sequence_length=8192 shard.activation_checkpointing=true"),
    ("mistral_7b", "24GB", "launch.ranks=8 data.sequence_length=2048 train.micro_batch_size=4 "
     "train.global_batch_size=32"),
    ("mistral_7b", "80GB", "shard=ddp launch.ranks=8 data.sequence_length=1024"),
    ("mistral_7b", "40GB", "shard=fsdp1 launch.ranks=4 data.sequence_length=2048"),
    ("mistral_7b", "48GB", "model.dtype=bfloat16 launch.ranks=1 data.sequence_length=2048"),
    ("llama_8b", "80GB", "launch.ranks=2 data.sequence_length=2048"),
    ("llama_8b", "80GB", "launch.ranks=8 data.sequence_length=8192 train.micro_batch_size=4 "
     "train.global_batch_size=32"),
    ("llama_8b", "40GB", "launch.ranks=4 data.sequence_length=4096"),
    ("llama_8b", "24GB", "launch.ranks=8 data.sequence_length=2048"),
    ("llama_8b", "24GB", "adapter=lora launch.ranks=1 data.sequence_length=2048"),
    ("llama_8b", "80GB", "objective=dpo launch.ranks=4 data.sequence_length=4096"),
    ("llama_8b", "56GB", "objective=dpo objective.reference=sharded launch.ranks=4 data.sequence_length=2048 "
     "shard.activation_checkpointing=selective"),
    ("llama_8b", "80GB", "optim=sgd launch.ranks=1 data.sequence_length=4096"),
    ("llama_8b", "48GB", "launch.ranks=16 data.sequence_length=8192 train.micro_batch_size=2 "
     "train.global_batch_size=64 shard.replicas=4"),
    ("llama_8b", "40GB", "launch.ranks=8 data.sequence_length=8192 shard.reshard_after_forward=false"),
    ("llama_70b", "80GB", "launch.ranks=8 data.sequence_length=2048"),
    ("llama_70b", "80GB", "launch.ranks=16 data.sequence_length=4096 train.global_batch_size=16"),
    ("llama_70b", "40GB", "launch.ranks=64 data.sequence_length=4096 train.global_batch_size=64"),
    ("mixtral_8x7b", "80GB", "launch.ranks=8 data.sequence_length=2048"),
    ("mixtral_8x7b", "80GB", "launch.ranks=16 data.sequence_length=4096 train.global_batch_size=16"),
    ("qwen3_30b", "80GB", "launch.ranks=4 data.sequence_length=2048"),
    ("qwen3_30b", "40GB", "launch.ranks=16 data.sequence_length=2048 train.global_batch_size=16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def planners() -> dict[str, Planner]:
    """What plans of a model have in common serves all cases of it."""
    return {name: Planner(config) for name, config in MODELS.items()}


def composed(arguments: Sequence[str]) -> PlanConfig:
    """The config of `plan`, from its command line."""
    (job,) = compose_jobs(PlanConfig, ["model.path=unused", *arguments], "plan")
    return job.config


def with_overrides(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """A command line with `overrides`, in the place of those of the same name."""
    names = {override.partition("=")[0] for override in overrides}
    return [*(argument for argument in arguments if argument.partition("=")[0] not in names), *overrides]


def run_of(config: PlanConfig) -> PlannedRun:
    sections = (config.model, config.shard, config.train, config.optim)
    length = config.data.sequence_length or 2048
    return PlannedRun(*sections, length, config.launch.num_ranks, config.adapter, objective=config.objective)


@pytest.mark.long
@pytest.mark.parametrize(("model", "memory", "typed"), sampled(CASES, 20, " ".join))
def test_what_is_advised_fits(planners: dict[str, Planner], model: str, memory: str, typed: str) -> None:
    planner, arguments, memory_bytes = planners[model], typed.split(), parse_size(memory, "memory")
    config = composed(arguments)
    assert planner.plan(run_of(config)).fits(memory_bytes) is False
    found = advise(planner, run_of(config), memory_bytes, chosen_settings(config))
    assert found
    for fits in found:
        changed = run_of(composed(with_overrides(arguments, fits.candidate.overrides)))
        planner.check(changed)  # as finetune does
        assert changed == fits.candidate.run
        plan = planner.plan(changed)
        assert plan.fits(memory_bytes) is True
        assert plan.peak_bytes == fits.peak_bytes
    check_order(found, arguments)


def check_order(found: Sequence[Fitting], arguments: Sequence[str]) -> None:
    """What trains the same comes first; what the user typed is changed only where it is said."""
    trains_other = [bool(fits.candidate.trains) for fits in found]
    assert trains_other == sorted(trains_other)
    for kind in (False, True):
        costs = [fits.candidate.cost for fits in found if bool(fits.candidate.trains) is kind]
        assert costs == sorted(costs)
    typed = {argument.partition("=")[0] for argument in arguments}
    for fits in found:
        replaced = typed & {override.partition("=")[0] for override in fits.candidate.overrides}
        assert replaced <= set(fits.candidate.replaced)


@pytest.mark.long
def test_facts_of_earlier_plans_change_no_plan(planners: dict[str, Planner]) -> None:
    planner, fresh = planners["gpt2_xl"], Planner(MODELS["gpt2_xl"])
    run = run_of(composed(["launch.ranks=2", "data.sequence_length=256"]))
    for shard in (Fsdp2Config(cpu_offload=True), Fsdp2Config(activation_checkpointing=True), Fsdp1Config()):
        changed = replace(run, shard=shard)
        assert planner.plan(changed).per_rank == fresh.plan(changed).per_rank
        narrow = replace(changed, model=replace(run.model, dtype="bfloat16", chunked_loss=True))
        assert planner.plan(narrow).per_rank == Planner(MODELS["gpt2_xl"]).plan(narrow).per_rank
        assert Planner(MODELS["gpt2_xl"]).plan(changed).per_rank == fresh.plan(changed).per_rank


@pytest.mark.long
def test_what_the_user_chose_stays_if_anything_fits_with_it() -> None:
    planner = Planner(llama_config(layers=6))
    typed = ["train.micro_batch_size=4", "train.global_batch_size=8", "launch.ranks=2"]
    run = run_of(composed(typed))
    peak = planner.plan(run).peak_bytes or 0
    found = advise(planner, run, int(peak * 0.9), {"train.micro_batch_size", "launch.ranks"})
    assert found
    assert not [fits for fits in found if fits.candidate.replaced]
    free = advise(planner, run, int(peak * 0.9))
    assert ("train.micro_batch_size=2",) in [fits.candidate.overrides for fits in free]


def test_more_ranks_get_a_batch_that_they_can_divide_and_it_is_said() -> None:
    planner = Planner(llama_config(layers=6))
    run = run_of(composed(["launch.ranks=8"]))
    found = advise(planner, replace(run, num_ranks=16), 10**9)
    assert (found[0].candidate.overrides, found[0].candidate.trains) == (
        ("train.global_batch_size=16",),
        ("a larger global batch",),
    )


def test_another_wrapper_computes_in_the_same_dtype_or_says_so() -> None:
    def wrappers(*typed: str) -> list[tuple[tuple[str, ...], str, str]]:
        run, given = run_of(composed(typed)), {setting.partition("=")[0] for setting in typed}
        options = [option for saver in memory_savers(run, given) for option in saver.options]
        chosen = [(option, option.change(run)) for option in options if "shard=fsdp2" in option.overrides]
        return [(option.overrides, one.shard.param_dtype, option.trains) for option, one in chosen if one is not None]

    bfloat16 = (("shard=fsdp2",), "bfloat16", "computes in bfloat16")
    same = (("shard=fsdp2", "shard.param_dtype=float32"), "float32", "")
    assert wrappers("shard=ddp", "launch.ranks=2") == [same, bfloat16]
    assert wrappers("shard=ddp", "launch.ranks=2", "shard.param_dtype=float32") == [(("shard=fsdp2",), "float32", "")]


def test_activations_are_offloaded_where_blocks_are_recomputed_and_parameters_last() -> None:
    run = run_of(composed(["launch.ranks=1"]))
    options = [option for saver in memory_savers(run, set()) for option in saver.options]
    (offload,) = (option for option in options if option.names == {"shard.activation_offload"})
    assert offload.change(run) is None
    selective, recomputed = (
        replace(run, shard=replace(run.shard, activation_checkpointing=kind)) for kind in ("selective", True)
    )
    assert offload.change(selective) is None
    changed = offload.change(recomputed)
    assert changed is not None
    assert changed.shard.activation_offload
    costs = {name: option.cost for option in options for name in option.names if name != "launch.ranks"}
    assert max(costs, key=lambda name: costs[name]) == "shard.cpu_offload"


@pytest.mark.long
def test_a_time_that_is_known_sorts_what_fits() -> None:
    def seconds(run: PlannedRun) -> float:
        return 1.0 if run.shard.cpu_offload else 2.0

    config = llama_config(layers=6)
    run = run_of(composed(["launch.ranks=2", "train.micro_batch_size=4"]))
    peak = Planner(config).plan(run).peak_bytes or 0
    found = advise(Planner(config, seconds=seconds), run, int(peak * 0.8))
    same = [fits.seconds for fits in found if not fits.candidate.trains]
    assert same == sorted(same, key=lambda value: value or 0.0)
    assert None not in same


# Runs on the ranks of this machine: what they change of a plain run with 2 ranks, and the advice that is tried.
BIG = llama_config(layers=6)
BIG.hidden_size, BIG.intermediate_size, BIG.head_dim = 192, 512, 64
FOUR: dict[str, Any] = {"train": TrainConfig(global_batch_size=8, micro_batch_size=4)}
REAL: list[tuple[str, dict[str, Any], float]] = [
    ("shard.activation_checkpointing=true", {**FOUR, "length": 256}, 0.58),
    ("shard.activation_checkpointing=selective", {**FOUR, "length": 512}, 0.78),
    ("train.micro_batch_size=1", {**FOUR, "length": 256}, 0.6),
    ("launch.ranks=4", {"length": 16}, 0.72),
    ("shard=fsdp2", {"shard": DdpConfig(), "length": 16}, 0.7),
    ("optim=adafactor", {"length": 16}, 0.75),
    ("model.dtype=bfloat16", {"length": 16}, 0.75),
    ("adapter=lora", {"length": 16}, 0.55),
    ("shard.activation_checkpointing=true", {**FOUR, "shard": Fsdp1Config(), "length": 256}, 0.58),
    ("shard.activation_checkpointing=true", {"objective": OBJECTIVES["orpo"](), "length": 256}, 0.72),
]


@pytest.mark.long
@pytest.mark.parametrize(("override", "settings", "share"), sampled(REAL, 9, lambda case: str(case[0])))
def test_advice_holds_on_real_ranks(override: str, settings: dict[str, Any], share: float) -> None:
    """With a limit between both peaks, the run is above it before, and below it with what is advised.

    The limit is far enough from both that an error of a plan of 15 % makes no difference.
    """
    given = dict(settings)
    length, train = given.pop("length"), given.pop("train", TrainConfig(global_batch_size=8))
    shard = given.pop("shard", Fsdp2Config())
    run = PlannedRun(ModelConfig(path="x"), shard, train, AdamWConfig(), length, 2, **given)
    planner = Planner(BIG, on_gpu=False)
    before = max(rank.peak for rank in measure_run(BIG, run))
    limit = int(before * share)
    chosen = {"launch.ranks", "train.micro_batch_size"} - {override.partition("=")[0]}
    found = {" ".join(f.candidate.overrides): f for f in advise(planner, run, limit, chosen)}
    assert override in found, list(found)
    after = max(rank.peak for rank in measure_run(BIG, found[override].candidate.run))
    assert after <= limit < before


@pytest.mark.long
def test_the_command_says_what_fits_and_ends_with_1(tmp_path: Path) -> None:
    model = tmp_path / "model"
    BIG.save_pretrained(model)
    typed = [f"model.path={model}", "data.sequence_length=128", "train.micro_batch_size=8"]
    typed += ["device.memory=60MB", "launch.device=cpu"]
    ended = run_recipe("plan", tmp_path / "run", *typed)
    assert ended.status == 1
    assert ended.err.count("error: ") == 1
    assert "more than the 57.2 MiB of device.memory" in ended.err
    result = ended.result
    assert (result["fits"], bool(result["advice"])) == (False, True)
    for advice in result["advice"]:
        assert " ".join(advice["overrides"]) in ended.out
        again = run_recipe("plan", tmp_path / "again", *with_overrides(typed, advice["overrides"]))
        assert (again.status, again.result["fits"]) == (0, True), again.err
        assert again.result["peak_bytes"] == advice["peak_bytes"]


@pytest.mark.slow
def test_where_nothing_fits_that_is_one_sentence_and_1(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path / "model")
    typed = [f"model.path={tmp_path / 'model'}", "data.sequence_length=32", "device.memory=1kB"]
    typed.append("launch.device=cpu")
    ended = run_recipe("plan", tmp_path / "run", *typed)
    assert (ended.status, ended.err.count("\n")) == (1, 2)
    assert "of device.memory; looking for settings that fit, which may take minutes" in ended.err
    assert ended.err.rstrip().endswith("no settings were found that fit.")
    assert ended.result["advice"] == []
    searched = run_recipe("plan", tmp_path / "searched", *typed, "search=true", "launch.ranks=1:4")
    assert searched.status == 1
    assert f"Planning {tmp_path / 'model'} for 1, 2, 4 ranks, which may take minutes" in searched.err
    assert "Nothing fits in 0.98 KiB with launch.ranks=1:4" in searched.err, searched.err
    assert not (tmp_path / "searched" / "search.png").exists()


def test_settings_that_train_the_same_stay_beside_others_that_need_less() -> None:
    run = run_of(composed(["data.sequence_length=64"]))

    def point(num_ranks: int, peak: int, *trains: str) -> Point:
        return Point(Fitting(Candidate(replace(run, num_ranks=num_ranks), (), 0.0, 0.0, trains), peak), 1.0)

    same, other = point(4, 900), point(1, 200, "LoRA")
    assert not other.is_better(same)
    assert point(2, 900).is_better(same)
    assert point(1, 100).is_better(other)
    front = Front((other, same), 2, 2, 1000)
    assert (front.cheapest, front.fewest) == (same, other)


@pytest.mark.slow
def test_a_search_finds_the_fewest_ranks_and_draws_the_front(tmp_path: Path) -> None:
    BIG.save_pretrained(tmp_path / "model")
    typed = [f"model.path={tmp_path / 'model'}", "data.sequence_length=64", "search=true", "launch.ranks=1:8"]
    planner = Planner(BIG)
    whole = run_of(composed(["data.sequence_length=64", "shard.activation_checkpointing=true"]))
    memory = (planner.plan(replace(whole, num_ranks=4)).peak_bytes or 0) + 1000
    ended = run_recipe("plan", tmp_path / "run", *typed, f"device.memory={memory}", "launch.device=cpu")
    assert ended.status == 0, ended.err
    result = ended.result
    assert (result["fits"], result["cheapest"]["num_ranks"]) == (True, 4)
    assert result["cheapest"]["changes"] == []
    assert all(row["changes"] for row in result["front"] if row["num_ranks"] < 4)
    for row in result["front"]:
        worse = [
            other
            for other in result["front"]
            if other is not row
            and bool(other["changes"]) <= bool(row["changes"])
            and all(other[name] <= row[name] for name in ("num_ranks", "peak_bytes", "relative_time"))
        ]
        assert not worse
        assert row["peak_bytes"] <= memory
    assert (tmp_path / "run" / "search.png").read_bytes().startswith(b"\x89PNG")
    assert "from 4 ranks on" in ended.out


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["launch.ranks=1:64"], "launch.ranks=1:64 is a range, which only search=true takes"),
        (["launch.ranks=5:7", "search=true", "device.memory=1GB"], "has no power of two in it"),
        (["launch.ranks=8:2", "search=true", "device.memory=1GB"], "launch.ranks=8:2 ends below its beginning"),
        (["launch.ranks=many"], "launch.ranks=many is neither a number of 1 to 99,999 ranks nor a range"),
        (["search=true", "device=custom"], "add device.memory=SIZE"),
        (["search=true", "device.memory=1GB", "dispatch.device_map=auto"], "is for one plan"),
    ],
)
def test_ranges_are_for_a_search(typed: list[str], says: str, tmp_path: Path) -> None:
    ended = run_recipe("plan", tmp_path / "run", "model.path=x", *typed)
    assert (ended.status, says in ended.err) == (2, True), ended.err


def test_elsewhere_a_range_of_ranks_is_refused(tmp_path: Path) -> None:
    ended = run_recipe("finetune", tmp_path / "run", "model.path=x", "data.path=y", "launch.ranks=1:64")
    assert (ended.status, "a range is for `fsdp-shard plan search=true`" in ended.err) == (2, True)


def test_a_plan_of_divided_sequences_changes_no_other_plan() -> None:
    config = llama_config(layers=2)
    alone = PlannedRun(ModelConfig(path="x"), Fsdp2Config(), TrainConfig(), AdamWConfig(), 64, 1)
    divided = replace(alone, num_ranks=2, shard=Fsdp2Config(context_parallel=2))
    planner = Planner(config)
    planner.plan(divided)
    assert planner.plan(alone).per_rank == Planner(llama_config(layers=2)).plan(alone).per_rank
    assert planner.cost(alone) == Planner(llama_config(layers=2)).cost(alone)


@pytest.mark.long
def test_a_search_of_several_machines_has_their_network(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path / "model")
    ended = run_recipe(
        "plan", tmp_path / "run", f"model.path={tmp_path / 'model'}", "data.sequence_length=32", "search=true",
        "launch.ranks=1:2", "launch.nodes=2", "launch.rendezvous=a:29400", "device=h100",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    assert {point["overrides"][0] for point in ended.result["front"]} <= {"launch.ranks=1", "launch.ranks=2"}
    assert all(point["seconds"] > 0 for point in ended.result["front"])


@pytest.mark.slow
def test_a_search_leaves_what_was_typed_and_lists_equal_rows_once() -> None:
    planner = Planner(llama_config(layers=6))
    run = run_of(composed(["data.sequence_length=64"]))
    peak = planner.plan(run).peak_bytes or 0
    for factor in (2.0, 0.5):
        typed = {"shard.cpu_offload", "model.chunked_loss"}
        front = search_front(planner, run, int(peak * factor), [1, 2], (typed, typed), 1)
        figures = [point.figures for point in front.points]
        assert len(figures) == len(set(figures))
        for point in front.points:
            assert not typed & {override.partition("=")[0] for override in point.fits.candidate.overrides}
    config = composed(["data.sequence_length=64", "shard.cpu_offload=false", "train.micro_batch_size=2"])
    assert switched_off(config) == {"shard.cpu_offload"}
    found = advise(planner, run, peak // 3, {"shard.cpu_offload"}, fixed=switched_off(config))
    assert not [fits for fits in found if "shard.cpu_offload=true" in fits.candidate.overrides]


def test_host_memory_that_is_short_is_no_advice() -> None:
    run = replace(run_of(composed(["launch.ranks=2", "data.sequence_length=64"])), on_gpu=True)
    run = replace(run, saves_asynchronously=False)
    planner = Planner(llama_config(), host=lambda run: HostMemory(1000, run.num_ranks))
    offloaded = replace(run, shard=Fsdp2Config(cpu_offload=True))
    assert planner.fits(run, planner.plan(run), 10**12) is True
    assert planner.fits(offloaded, planner.plan(offloaded), 10**12) is False
    limit = (planner.plan(offloaded).needed_bytes + planner.plan(run).needed_bytes) // 2
    planner.max_plans = 12
    kept = {"launch.ranks", "train.micro_batch_size", "model.chunked_loss", "shard.tensor_parallel"}
    kept |= {"shard.activation_offload", "shard.activation_checkpointing"}
    short = advise(planner, run, limit, fixed=kept, trains_other=False)
    planner.host = None
    free = advise(planner, run, limit, fixed=kept, trains_other=False)
    assert [[fits.candidate.overrides for fits in found] for found in (short, free)] == [
        [],
        [("shard.cpu_offload=true",)],
    ]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["objective=dpo", "objective.reference=dispatched", "model.dtype=bfloat16", "shard.param_dtype=float32"],
         "model.dtype=bfloat16 would round them before"),
        (["objective=dpo", "objective.reference=adapter"], "but adapter=none"),
        (["objective=simpo", "data.packing=true", "launch.ranks=2", "shard.context_parallel=2"], "packed pairs"),
        (["objective=dpo", "data.streaming=true", "objective.reference=precomputed"], "needs all samples before"),
        (["data.packing=true", "model.attention=flash_attention_2", "train.micro_batch_size=2"], "boundaries of doc"),
        (["optim=muon", "launch.ranks=2", "shard.tensor_parallel=2"], r"cannot gather with shard\.tensor_parallel=2"),
        (["adapter=lora", "launch.ranks=2", "shard.tensor_parallel=2"], "adapter=lora cannot be combined with"),
        (["adapter=lora", "adapter.init=pissa", "train.ema_decay=0.9"], "train.ema_decay cannot be combined with"),
        (["model.chunked_loss=true", "launch.ranks=2", "shard.tensor_parallel=2"], "divides the output head"),
    ],
)  # fmt: skip
def test_what_finetune_would_refuse_is_not_advised(typed: list[str], says: str) -> None:
    config = composed([*typed, "data.sequence_length=64"])
    run = replace(run_of(config), is_packed=config.data.packing, is_streamed=config.data.streaming)
    with pytest.raises(InputError, match=says):
        Planner(llama_config()).check(run)


def test_layers_with_fused_kernels_are_not_divided() -> None:
    """A run's own settings, which `doctor` and `plan RUN` plan, may have kernels; `plan` takes none."""
    run = run_of(composed(["data.sequence_length=64", "launch.ranks=2", "shard.tensor_parallel=2"]))
    with_kernels = replace(run, model=replace(run.model, kernels="liger"))
    with pytest.raises(InputError, match=r"model\.kernels=liger cannot be combined with shard\.tensor_parallel=2"):
        Planner(llama_config()).check(with_kernels)


def test_packing_is_refused_where_finetune_refuses_it() -> None:
    run = replace(run_of(composed(["data.packing=true", "data.sequence_length=64"])), is_packed=True)
    Planner(llama_config()).check_model(run)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 257,
    }
    opt = OPTConfig(architectures=["OPTForCausalLM"], word_embed_proj_dim=32, **sizes)
    with pytest.raises(InputError, match=r"OPTForCausalLM cannot .*Set data\.packing=false"):
        Planner(opt).check_model(run)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train.epochs=2 data.streaming=true", "train.epochs=2 cannot be combined with data.streaming=true"),
        ("model.task=masked_lm train.sample_prompts=[hi]", "train.sample_prompts is for model.task=causal_lm"),
        ("train.neftune_alpha=5 shard.context_parallel=2 launch.ranks=2", "train.neftune_alpha=5.0 cannot be comb"),
        (
            "data.packing=true model.attention=flash_attention_2 train.micro_batch_size=2",
            "flash_attention_2 needs train.micro_batch_size=1",
        ),
        ("launch.nodes=2:3 launch.rendezvous=a:1", "1 x 3 data-parallel ranks = 3"),
    ],
)
def test_sections_are_refused_where_finetune_refuses_them(typed: str, said: str) -> None:
    config = composed(["data.sequence_length=64", *typed.split()])
    num_ranks = config.launch.num_ranks
    run = PlannedRun.of(config, 64, num_ranks, on_gpu=False, resumes=False)
    planner = planner_for(config, llama_config(), run, planned_hardware(config, num_ranks))
    with pytest.raises(InputError, match=re.escape(said)):
        planner.check(run)


def test_architectures_are_refused_where_finetune_refuses_them(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 257}
    bert = BertConfig(architectures=["BertLMHeadModel"], intermediate_size=32, **sizes)
    causal = run_of(composed(["data.sequence_length=64"]))
    with pytest.raises(InputError, match="attends to later tokens"):
        Planner(bert).check_model(causal)
    one = {"id2label": {0: "a"}, **sizes}
    classifier = BertConfig(architectures=["BertForSequenceClassification"], intermediate_size=32, **one)
    with pytest.raises(InputError, match="with one class there is nothing to learn"):
        Planner(classifier).check_model(replace(causal, model=ModelConfig(path="x", task="sequence_classification")))
    t5 = T5Config(
        architectures=["T5ForConditionalGeneration"], d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2,
        vocab_size=257,
    )  # fmt: skip
    assert getattr(t5, "decoder_start_token_id", None) is None
    with pytest.raises(InputError, match="cannot make the decoder's input"):
        Planner(t5).check_model(replace(causal, model=ModelConfig(path="x", task="seq2seq")))
    teacher = llama_config()
    teacher.vocab_size = 300
    teacher.save_pretrained(tmp_path)
    distilled = replace(causal, objective=DistillConfig(teacher=str(tmp_path)))
    with pytest.raises(InputError, match="has a vocabulary of 300 tokens"):
        Planner(llama_config()).check_model(distilled)


@pytest.mark.parametrize("offloads", ["shard.cpu_offload=true", "shard.activation_offload=true"])
def test_nothing_is_offloaded_from_a_cpu(offloads: str) -> None:
    typed = ["data.sequence_length=64", offloads]
    for of_device, is_refused in (("device=cpu", True), ("device=h100", False), ("device.memory=8GB", False)):
        config = composed([*typed, of_device])
        run = run_of(config)
        planner = planner_for(config, llama_config(), run, planned_hardware(config, 1))
        with pytest.raises(InputError, match="needs a GPU to offload from") if is_refused else nullcontext():
            planner.check(run)


def test_a_model_that_no_number_of_ranks_can_hold_costs_no_search() -> None:
    huge = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=1 << 23, intermediate_size=1 << 25, num_hidden_layers=4,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=1000,
    )  # fmt: skip
    planner = Planner(huge, host=lambda run: HostMemory(2 << 40, 8))
    run = run_of(composed(["data.sequence_length=128", "launch.ranks=8"]))
    assert advise(planner, run, 80 << 30) == []
    front = search_front(planner, run, 80 << 30, [8, 64], ((), ()), 1)
    assert (front.points, planner.num_plans) == ((), 0)


def test_a_micro_batch_of_a_hundred_million_tokens_is_planned() -> None:
    run = run_of(composed(["data.sequence_length=100000000"]))
    config = llama_config()
    config.vocab_size = 128_000
    assert (Planner(config).plan(run).peak_bytes or 0) > 10**10
