"""What `fsdp-shard push` puts beside what a repository has, takes from the source, and leaves."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fsdp_shard.checkpoint import CARD_MARK, locate
from tests.support.commands import FSDP_SHARD, run
from tests.support.hub_stand_in import Failure, HubStandIn, push, push_variables
from tests.support.tiny import save_adapter

_MODEL = "model.safetensors"
_CONVERT = """
import shutil, sys
import fsdp_shard as fs
later, step, target = sys.argv[1:]
run = step.rpartition("/checkpoints/")[0]
config = fs.ConvertConfig(source=run, target=target, push_to="org/name")
fs.check_conversion(config)
report = fs.run_conversion(config)
shutil.move(later, step)
fs.push_converted(config, report)
"""


def _step_to_come(trained: Path, home: Path) -> tuple[Path, Path, Path]:
    """A copy of the run without its last step: the run, where the step is, and where it belongs."""
    run_dir = shutil.copytree(trained / "run", home / "run")
    step = locate(f"{run_dir}@latest").weights
    shutil.move(step, home / "later")
    assert locate(run_dir).step == 2
    return run_dir, home / "later", step


def _check_is_step_2(trained: Path, files: dict[str, bytes], home: Path) -> None:
    (home / _MODEL).write_bytes(files[_MODEL])
    pushed, expected = locate(home / _MODEL).index, locate(f"{trained / 'run'}@step-2").index
    assert all(torch.equal(pushed.read(name), expected.read(name)) for name in expected.tensors)
    assert "It is step 2 of the run" in files["README.md"].decode()


@pytest.mark.long
def test_the_step_that_was_found_is_pushed_while_the_run_goes_on(
    trained: Path, hub: HubStandIn, tmp_path: Path
) -> None:
    run_dir, later, step = _step_to_come(trained, tmp_path)

    def save(method: str, path: str, count: int) -> None:
        if path == "/api/repos/create":
            shutil.move(later, step)

    hub.fail = save
    done = push(hub, tmp_path, run_dir, "org/name")
    assert done.status == 0, done.err
    assert locate(run_dir).step == 4
    _check_is_step_2(trained, hub.repositories["org/name"].files, tmp_path)


@pytest.mark.long
def test_the_step_that_was_converted_is_described_while_the_run_goes_on(
    trained: Path, hub: HubStandIn, tmp_path: Path
) -> None:
    _, later, step = _step_to_come(trained, tmp_path)
    command: list[str | Path] = [sys.executable, "-c", _CONVERT, later, step, tmp_path / "target"]
    done = run(command, tmp_path, **push_variables(hub, tmp_path))
    assert done.status == 0, done.err
    _check_is_step_2(trained, hub.repositories["org/name"].files, tmp_path)


@pytest.mark.long
def test_what_an_earlier_model_leaves_is_deleted(tiny_model: Path, hub: HubStandIn, tmp_path: Path) -> None:
    assert push(hub, tmp_path, tiny_model, "org/name").status == 0
    files = hub.repositories["org/name"].files
    stale = {
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "added_tokens.json",
        "tokenizer.model",
        "preprocessor_config.json",
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "manifest.json",
    }
    own = {"model.fp16.safetensors", "LICENSE", "tokenizer_notes/a.md", "onnx/model.safetensors", "notes.txt"}
    files |= dict.fromkeys(stale | own, b"{}")
    files["manifest.json"] = json.dumps({"kind": "fsdp-shard checkpoint"}).encode()
    done = push(hub, tmp_path, tiny_model, "org/name")
    assert done.status == 0, done.err
    now = set(hub.repositories["org/name"].files)
    assert not stale & now
    assert own <= now
    assert {line.split()[0] for line in done.out.splitlines() if "deleted: it is of an earlier" in line} == stale

    hub.repositories["org/name"].files["manifest.json"] = b'{"name": "a web site"}'
    assert push(hub, tmp_path, tiny_model, "org/name").status == 0
    assert "manifest.json" in hub.repositories["org/name"].files


@pytest.mark.long
def test_a_card_made_before_is_made_anew(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    model = shutil.copytree(trained / "tiny", tmp_path / "model")
    (model / "README.md").write_text(f"{CARD_MARK}\n# org/other\n")
    assert push(hub, tmp_path, model, "org/name").status == 0
    card = hub.repositories["org/name"].files["README.md"].decode()
    assert "# org/name" in card
    assert "org/other" not in card


def test_evaluations_that_would_not_be_in_the_card_are_refused(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    source = f"{trained / 'run'}@best"
    converted = run([*FSDP_SHARD, "convert", f"source={source}", "target=model", "run_dir=c"], tmp_path)
    assert converted.status == 0, converted.err
    (tmp_path / "model" / "README.md").write_text("Mine.")
    refused = push(hub, tmp_path, "model", "org/name", "--evaluations", trained / "evaluated")
    assert refused.status == 2
    assert "README.md is pushed as it is, so --evaluations would not be in the model card" in refused.error
    assert hub.repositories == {}


@pytest.mark.long
def test_an_adapter_of_peft_without_its_base(hub: HubStandIn, tiny_model: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "secret" / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    assert (adapter / "README.md").exists()
    shutil.rmtree(base)
    hub.create("org/name", private=True, **{"config.json": b"{}", _MODEL: b"of an earlier model"})
    done = push(hub, tmp_path, adapter, "org/name", "--adapter", "org/base")
    assert done.status == 0, done.err
    files = hub.repositories["org/name"].files
    card = files["README.md"].decode()
    assert CARD_MARK in card
    assert "secret" not in card
    assert "base_model: org/base" in card
    assert 'PeftModel.from_pretrained(base, "org/name")' in card
    assert "AutoPeftModel" not in card, "peft has written no task_type"
    assert not {_MODEL, "config.json"} & set(files)


def test_an_adapter_with_a_new_head_is_pushed_as_a_model_only(
    hub: HubStandIn, tiny_model: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_model)
    entries = {"architectures": ["X"], "id2label": {"0": "r"}, "label2id": {"r": 0}, "pad_token_id": 1}
    head = {"replaced": [], "config": entries}
    recorded = {"path": "x", "fingerprint": "x", "quantize": "none", "head": head}
    (adapter / "adapter_base.json").write_text(json.dumps(recorded))
    refused = push(hub, tmp_path, adapter, "org/name", "--adapter", "org/base")
    assert refused.status == 2
    assert "is an adapter with a new head of a classifier" in refused.error
    assert hub.repositories == {}


def test_no_repository_for_a_conversion_that_cannot_be(hub: HubStandIn, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    without = tmp_path / "without"
    without.mkdir()
    shutil.copy(tiny_model / _MODEL, without)
    for source, target, said in (
        (tiny_model, "taken", "exists already"),
        (tmp_path / "absent", "new", "does not exist"),
        (without, "new", "there is no config.json"),
    ):
        command = [*FSDP_SHARD, "convert", f"source={source}", f"target={target}", "push_to=org/name", "run_dir=c"]
        done = run(command, tmp_path, **push_variables(hub, tmp_path))
        assert done.status == 2
        assert said in done.error
    assert hub.repositories == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"RateLimit": '"api";r=0;t=1', "Retry-After": "90"}, 2), ({"Retry-After": "1"}, 1), ({}, 5)],
)
def test_waits_as_long_as_the_hub_asks(
    hub: HubStandIn, tiny_model: Path, tmp_path: Path, headers: dict[str, str], seconds: int
) -> None:
    hub.fail = lambda method, path, count: Failure(429, headers) if "whoami" in path and count == 0 else None
    done = push(hub, tmp_path, tiny_model, "org/name")
    assert done.status == 0, done.err
    assert f"waiting {seconds} s, attempt 1 of 4" in done.err
