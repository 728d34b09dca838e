"""One `locate` answers what a path leads to, and a command locates a path and opens its weights once."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM

from fsdp_shard.checkpoint import StepStore, convert, location, summarize_checkpoint, verify
from fsdp_shard.checkpoint.formats import native_sharded
from fsdp_shard.checkpoint.formats.trainer_layouts import find_checkpoint
from fsdp_shard.checkpoint.io import safetensors_format
from fsdp_shard.checkpoint.location import locate, open_checkpoint
from fsdp_shard.checkpoint.steps.shard_index import read_shard_index
from fsdp_shard.cli import run_command
from fsdp_shard.errors import CheckpointError, ConfigError, DifferenceError, ModelError
from fsdp_shard.inference import load_dispatched
from tests.support.tiny import byte_tokenizer, llama, llama_config, save_adapter, save_model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: None, "is not a model: it has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
        (lambda d: (d / "config.json").write_text("{}"), "has no model_type"),
    ],
)
def test_a_directory_that_is_no_model(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path)
    found = locate(tmp_path)
    with pytest.raises(ModelError, match=message) as raised:
        found.config_directory  # noqa: B018  # reading it is the check
    assert str(tmp_path) in str(raised.value)


def test_planning_needs_no_weights(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    found = locate(str(tmp_path))
    assert (found.config_directory, found.tokenizer_directory, found.format) == (tmp_path, tmp_path, None)
    with pytest.raises(CheckpointError, match=r"not a checkpoint that .* can read: the directory holds config\.json"):
        found.index  # noqa: B018


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; give a checkpoint"):
        locate("./nowhere")
    with pytest.raises(CheckpointError, match=r"There is no GGUF file .*model\.gguf"):
        locate(tmp_path, "model.gguf")


@pytest.mark.parametrize("path", ["", 5, b"model"])
def test_what_is_no_path(path: Any, tiny_model: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: open_checkpoint(path),
        lambda: verify(tiny_model, against=path),
        lambda: load_dispatched(tiny_model, config=path),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=rf"^{path!r} is not a path; give a string or a pathlib.Path"):
            call()


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    with pytest.raises(CheckpointError, match=r"model\.gguf.* GGUF file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_weight_file_has_the_config_of_its_directory(tiny_model: Path) -> None:
    found = locate(tiny_model / "model.safetensors")
    assert (found.config_directory, found.format) == (tiny_model, "huggingface")
    assert found.index.file == tiny_model / "model.safetensors"
    assert set(found.model_files) == set(locate(tiny_model).model_files)


def test_other_processes_get_the_location_and_open_the_files_themselves(tiny_model: Path) -> None:
    found = locate(tiny_model)
    assert found.index is found.index
    received = pickle.loads(pickle.dumps(found))
    assert received == found
    assert "index" not in vars(received)
    assert received.index.names == found.index.names


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the steps 2, 4 and 400, of which 4 is the best; the weights of step 4 are those of `tiny_model`."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    store = StepStore(directory / "checkpoints")
    store.root.mkdir(parents=True)
    other = save_model(directory.parent / "other", seed=1)
    for step, model in ((2, other), (4, tiny_model), (400, other)):
        convert(model, store.path(step))
    store.set_latest(4)  # as a crash leaves it
    store.set_best(4)
    return directory


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("run", 400),
        ("run@latest", 400),
        ("run@best", 4),
        ("run@step-2", 2),
        ("run@step-00000400", 400),
        ("run@400", 400),
        ("run/checkpoints@best", 4),
        ("run/checkpoints/best", 4),
        ("run/checkpoints/latest", 400),
    ],
)
def test_the_names_of_a_step(name: str, step: int, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    found = locate(name)
    assert (str(found), found.weights.name) == (name, f"step-{step:08d}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run@step-3", r"run has no step 3: its steps are 2, 4, 400, the best is 4\. Give one of them, such as "),
        ("run@5", "run has no step 5: its steps are 2, 4, 400"),
        ("run@bets", "run has no bets step: its steps are 2, 4, 400"),
        ("run/checkpoints/step-00000003@best", "no such directory"),
        ("org/name@best", "names a step of the run org/name, but there is no such directory"),
        ("other@best", "other has no finished checkpoint: no step directory in it"),
        ("@best", "@best does not exist"),
    ],
)
def test_a_step_that_is_not_there(name: str, message: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    for use in (locate, verify, partial(convert, target="new"), load_dispatched, summarize_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            use(name)


def test_an_at_in_the_name_of_a_directory(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run@best").symlink_to(tiny_model)
    assert locate(tmp_path / "run@best").weights == tmp_path / "run@best"


def test_what_is_called_best_and_is_no_pointer(tmp_path: Path) -> None:
    for name, make in (("best", lambda path: path.write_text("../elsewhere")), ("latest", os.mkfifo)):
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} is not a checkpoint that fsdp-shard can read"):
            open_checkpoint(tmp_path / name)


@pytest.mark.long
def test_every_command_takes_the_name_of_a_step(
    run: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr("fsdp_shard.cli.run_recipe.start_garbage_collection", lambda: None)
    run_command(["inspect", "run@best"])
    run_command(["verify", "run/checkpoints/best", "--against", str(tiny_model)])
    run_command(["diff", "run@step-4", str(tiny_model)])
    assert "step-00000004" in capsys.readouterr().out
    run_command(["convert", "source=run@best", f"target={tmp_path / 'model'}", f"run_dir={tmp_path / 'convert'}"])
    assert verify(tmp_path / "model", tiny_model).is_sound
    generation = ["prompt=abc", "generation.max_new_tokens=4"]
    run_command(["generate", "checkpoint=run@best", *generation, f"run_dir={tmp_path / 'one'}"])
    run_command(["generate", f"checkpoint={tiny_model}", *generation, f"run_dir={tmp_path / 'two'}"])
    completions = [(tmp_path / name / "completions.jsonl").read_text() for name in ("one", "two")]
    assert completions[0] == completions[1]
    run_command(["plan", "model.path=run@best", f"run_dir={tmp_path / 'plan'}"])
    assert load_dispatched("run@best").num_parameters() == locate("run@best").index.num_bytes // 4


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often paths are resolved, and the header of each file, or the index of rank files, is parsed."""
    found: Counter[str] = Counter()
    parse = safetensors_format._header_length

    def counted_index(root: Path) -> Any:
        found["index of rank files"] += 1
        return read_shard_index(root)

    def counted_find(path: Path, *arguments: Any) -> Any:
        found[f"resolved {path.name}"] += 1
        return find_checkpoint(path, *arguments)

    def counted_parse(data: bytes, size: int, path: Path) -> Any:
        found[path.name] += 1
        return parse(data, size, path)

    monkeypatch.setattr(location, "find_checkpoint", counted_find)
    monkeypatch.setattr(safetensors_format, "_header_length", counted_parse)
    monkeypatch.setattr(native_sharded, "read_shard_index", counted_index)
    monkeypatch.setattr("fsdp_shard.checkpoint.integrity.verify.read_shard_index", counted_index)
    monkeypatch.setattr("fsdp_shard.cli.run_recipe.start_garbage_collection", lambda: None)  # not in the tests' process
    return found


@pytest.fixture
def ranks(tiny_model: Path, tmp_path: Path) -> Path:
    convert(tiny_model, tmp_path / "ranks", format="sharded", ranks=2)
    return tmp_path / "ranks"


ONCE = {"resolved ranks": 1, "index of rank files": 1}


def test_generate_resolves_its_path_and_parses_the_index_once(
    ranks: Path, tmp_path: Path, counts: Counter[str]
) -> None:
    settings = [f"checkpoint={ranks}", "prompt=abc", "generation.max_new_tokens=2", f"run_dir={tmp_path / 'run'}"]
    run_command(["generate", *settings])
    assert json.loads((tmp_path / "run" / "result.json").read_text())["num_new_tokens"] == 2
    assert counts == ONCE


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_other_commands_do_so_too(command: str, ranks: Path, counts: Counter[str]) -> None:
    run_command([command, str(ranks)])
    # `verify` compares what the index says with the headers, as a whole.
    assert counts == (ONCE if command == "inspect" else ONCE | {"index of rank files": 2})


@pytest.mark.long
def test_a_logit_comparison_opens_each_checkpoint_once(ranks: Path, tiny_model: Path, counts: Counter[str]) -> None:
    run_command(["diff", str(ranks), str(tiny_model), "--logits", "abc"])
    assert counts == ONCE | {f"resolved {tiny_model.name}": 1, "model.safetensors": 1}


def write_alone(kind: str, directory: Path) -> Path:
    """The weights of the tiny model, as a training stack leaves them without config and tokenizer."""
    states, directory = llama().state_dict(), directory / kind
    directory.mkdir()
    if kind in ("weights.pt", "pytorch_model.bin"):
        torch.save(states, directory / kind)
        return directory / kind
    target = directory / "pytorch_model_fsdp_0" if kind == "accelerate" else directory
    nested = {"model": states} if kind == "accelerate" else states
    dcp.save(nested, storage_writer=dcp.FileSystemWriter(target), no_dist=True)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("kind", ["weights.pt", "pytorch_model.bin", "dcp", "accelerate"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_weights_that_lie_alone(
    kind: str,
    tiny_model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("fsdp_shard.cli.run_recipe.start_garbage_collection", lambda: None)
    alone = write_alone(kind, tmp_path)
    with pytest.raises(ModelError, match="holds weights, but there is no config"):
        run_command(["diff", str(alone), str(tiny_model), "--logits", "abc"])
    with pytest.raises(ModelError, match=rf"{kind}.* holds weights, but there is no config\.json .*config=PATH and"):
        run_command(["generate", f"checkpoint={alone}", "prompt=abc", f"run_dir={tmp_path / 'none'}"])
    for name, source in (("alone", alone), ("whole", tiny_model)):
        config = [f"config={tiny_model}"] if source == alone else []
        settings = [f"checkpoint={source}", "prompt=abc", "generation.max_new_tokens=4"]
        run_command(["generate", *settings, *config, f"run_dir={tmp_path / name}"])
    completions = [(tmp_path / name / "completions.jsonl").read_text() for name in ("alone", "whole")]
    assert completions[0] == completions[1]
    evaluated = ["data.path=" + str(texts / "held_out.txt"), "data.sequence_length=64", f"run_dir={tmp_path / 'loss'}"]
    run_command(["evaluate", f"checkpoint={alone}", f"config={tiny_model}", *evaluated])
    assert json.loads((tmp_path / "loss" / "result.json").read_text())["num_tokens"] > 1000
    run_command(["diff", str(alone), str(tiny_model), "--logits", "abc", "--config", str(tiny_model)])
    assert "the largest difference is 0" in capsys.readouterr().out
    convert(alone, tmp_path / "converted", config=tiny_model)
    assert set(locate(tmp_path / "converted").model_files) == set(locate(tiny_model).model_files)
    assert verify(tmp_path / "converted", tiny_model).is_sound
    assert load_dispatched(alone, config=tiny_model).num_parameters() == llama().num_parameters()


def test_scripts_beside_weights_are_not_the_model_s(tiny_model: Path, tmp_path: Path) -> None:
    alone = write_alone("weights.pt", tmp_path)
    for name in ("train.py", "tokenizer_training.py", "LICENSE", "tokenizer.json"):
        (alone.parent / name).write_text("{}")
    convert(alone, tmp_path / "converted")
    assert {path.name for path in (tmp_path / "converted").iterdir()} == {
        *("manifest.json", "model.safetensors", "tokenizer.json")
    }
    own = shutil.copytree(tiny_model, tmp_path / "own")
    (own / "modeling_own.py").write_text("")
    assert "modeling_own.py" not in locate(own).model_files
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.Own"}}))
    assert "modeling_own.py" in locate(own).model_files


def test_a_tokenizer_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    alone, config, tokenizer = write_alone("weights.pt", tmp_path), tmp_path / "config", tmp_path / "tokenizer"
    llama_config().save_pretrained(config)
    byte_tokenizer().save_pretrained(tokenizer)
    found = locate(alone, config=config / "config.json", tokenizer=tokenizer)
    assert (found.config_directory, found.tokenizer_directory) == (config, tokenizer)
    assert {*found.model_files} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    states = found.file_states()
    (tokenizer / "tokenizer_config.json").write_text("{}")
    assert found.file_states() != states, "a resumed file of completions is of the same tokenizer"
    with pytest.raises(ModelError, match=rf"tokenizer={config}: there are no files of a tokenizer in {config}"):
        locate(tiny_model, tokenizer=config).model_files  # noqa: B018
    byte_tokenizer().save_pretrained(alone.parent)
    assert locate(alone, config=tiny_model).tokenizer_directory == alone.parent, (
        "theirs, rather than that of the config"
    )


def test_what_is_named_is_used_instead_of_what_the_weights_have(tiny_model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other")
    for file, change in (("config.json", {"rms_norm_eps": 0.5}), ("tokenizer_config.json", {"model_max_length": 77})):
        (other / file).write_text(json.dumps(json.loads((other / file).read_text()) | change))
    assert load_dispatched(tiny_model, config=other).config.rms_norm_eps == 0.5
    convert(tiny_model, tmp_path / "converted", config=other, tokenizer=other)
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["rms_norm_eps"] == 0.5
    assert json.loads((tmp_path / "converted" / "tokenizer_config.json").read_text())["model_max_length"] == 77


@pytest.mark.parametrize("name", ["config", "tokenizer"])
def test_a_named_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    named: dict[str, Any] = {name: tmp_path / "nowhere"}
    found = locate(write_alone("weights.pt", tmp_path), **named)
    with pytest.raises(CheckpointError, match=f"^{name}=.*nowhere: .*nowhere does not exist"):
        found.model_files  # noqa: B018


def test_a_file_that_is_no_checkpoint_is_not_asked_for_a_config(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text("hello")
    with pytest.raises(
        CheckpointError, match=r"weights\.pt is not a checkpoint that fsdp-shard can read: it is neither a saf"
    ):
        run_command(["generate", f"checkpoint={tmp_path / 'weights.pt'}", "prompt=abc", f"run_dir={tmp_path / 'run'}"])


def test_an_adapter_of_an_old_peft(tiny_model: Path, tmp_path: Path) -> None:
    new = save_adapter(tmp_path / "new", tiny_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), new)
        model.save_pretrained(str(tmp_path / "old"), safe_serialization=False)
    with pytest.raises(
        CheckpointError, match=r"old peft \(adapter_model\.bin\); load it .* which writes adapter_model\.s"
    ):
        convert(tmp_path / "old", tmp_path / "target")


@pytest.mark.long
def test_an_adapter_whose_base_moved(
    tiny_model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("fsdp_shard.cli.run_recipe.start_garbage_collection", lambda: None)
    base = shutil.copytree(tiny_model, tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    expected = load_dispatched(adapter).state_dict()
    base.rename(tmp_path / "moved")
    text = ["data.path=" + str(texts / "held_out.txt"), "data.sequence_length=64"]
    for command, settings in (("generate", ["prompt=abc", "generation.max_new_tokens=2"]), ("evaluate", text)):
        arguments = [command, f"checkpoint={adapter}", *settings, f"run_dir={tmp_path / command}"]
        with pytest.raises(CheckpointError, match=r"adapter of .*base, which cannot be read: .*base=PATH in gen"):
            run_command(arguments)
        run_command([*arguments, f"base={tmp_path / 'moved'}"])
        assert f"adapter {adapter} on {tmp_path / 'moved'}" in capsys.readouterr().out
    loaded = load_dispatched(adapter, base=tmp_path / "moved").state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_moved_base_is_named_to_compare(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    adapter, merged, moved = save_adapter(tmp_path / "adapter", base), tmp_path / "merged", str(tmp_path / "moved")
    convert(adapter, merged)
    base.rename(moved)
    run_command(["inspect", str(adapter)])
    assert f"base:        {base}" in capsys.readouterr().out
    for compare in (["verify", str(adapter), "--against", str(merged)], ["diff", str(merged), str(adapter)]):
        with pytest.raises((CheckpointError, DifferenceError)):
            run_command(compare)
        assert "--base in verify and diff, or correct" in capsys.readouterr().out or compare[0] == "diff"
        run_command([*compare, "--base", moved])
    for unused in (
        *(["verify", str(merged), "--against", moved], ["diff", str(merged), moved], ["verify", str(merged)]),
        *(["verify", str(adapter), "--against", str(adapter)], ["diff", str(adapter), str(adapter)]),
    ):
        with pytest.raises(CheckpointError, match=r"The base model .*moved is for an adapter"):
            run_command([*unused, "--base", moved])
    (adapter / "manifest.json").write_text("{}")  # has a digest of each file
    with pytest.raises(CheckpointError, match=r"--base in verify and diff\.$"):
        locate(adapter).base  # noqa: B018


def test_an_adapter_of_weights_that_lie_alone(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_model)
    alone = write_alone("weights.pt", tmp_path)
    convert(adapter, tmp_path / "merged", base=alone, config=tiny_model)
    convert(adapter, tmp_path / "expected")
    assert verify(tmp_path / "merged", tmp_path / "expected").is_sound
    assert set(locate(tmp_path / "merged").model_files) == set(locate(tiny_model).model_files)


_SIDE_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


@pytest.mark.parametrize("name", [*_SIDE_FILES, "adapter_config.json"])
def test_side_files_that_lead_out_of_the_directory_are_refused(name: str, tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "model"
    if name == "adapter_config.json":
        save_adapter(root, tiny_model)
    else:
        shutil.copytree(tiny_model, root)
    (outside := tmp_path / "outside").write_bytes((root / name).read_bytes() if (root / name).exists() else b"")
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(outside)
    reads: list[Callable[[], object]] = [
        lambda: load_dispatched(root),
        lambda: locate(root).index,
        lambda: locate(root).tokenizer_directory,
        lambda: summarize_checkpoint(root),
        lambda: convert(root, tmp_path / "target"),
    ]
    if name != "adapter_config.json":
        reads += [lambda: locate(root).config_directory, lambda: locate(tiny_model, tokenizer=root).tokenizer_directory]
    for read in reads:
        with pytest.raises(CheckpointError, match=f"{name} is a link to .*outside.* it is not followed"):
            read()
    assert any(name in problem.message for problem in verify(root).problems)


def test_links_of_a_hub_cache_are_followed_to_their_own_blobs(tiny_model: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "1", tmp_path / "models--org--name" / "blobs"
    shutil.copytree(tiny_model, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert locate(snapshot).tokenizer_directory == snapshot
    assert verify(snapshot).problems == ()
    load_dispatched(snapshot)


def test_a_hub_id_without_an_organization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--gpt2"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    model = save_model(repository / "snapshots" / ("a" * 40))
    adapter = save_adapter(tmp_path / "adapter", model)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "gpt2"}))

    assert locate("gpt2").config_directory == model
    assert locate(adapter).base.config_directory == model
    with pytest.raises(ModelError, match="gpt3 is neither a local checkpoint or directory nor a hub model"):
        locate("gpt3")
    with pytest.raises(CheckpointError, match=r"model\.bin does not exist; give a checkpoint"):
        locate("model.bin")


def test_an_adapter_of_a_revision_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, commits = tmp_path / "hub" / "models--org--m", {"main": "a" * 40, "v2": "b" * 40}
    (repository / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(commits.items()):
        save_model(repository / "snapshots" / commit, seed=seed)
        (repository / "refs" / revision).write_text(commit)
    adapter = save_adapter(tmp_path / "adapter", repository / "snapshots" / commits["v2"])
    config = json.loads((adapter / "adapter_config.json").read_text())

    def base(revision: Any, given: str | None = None) -> str:
        changed = config | {"base_model_name_or_path": "org/m", "revision": revision}
        (adapter / "adapter_config.json").write_text(json.dumps(changed))
        return locate(adapter, base=given).base.weights.name

    assert [base(None), base("v2"), base("v2", "org/m")] == [commits["main"], commits["v2"], commits["main"]]
    with pytest.raises(
        CheckpointError, match="org/m, revision v3, is neither a local directory nor in the hub's cache"
    ):
        base("v3")
    for wrong in ("../../refs/v2", "/v2", 2):
        with pytest.raises(CheckpointError, match=r"revision is .*; expected a branch, tag or commit"):
            base(wrong)
