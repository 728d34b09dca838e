"""`fsdp-shard push` and `convert push_to=`, to a hub on this machine that huggingface_hub is pointed at."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_shard.checkpoint import CARD_MARK, ConvertReport, HubTarget, convert, locate
from fsdp_shard.cli import push_converted, push_to_hub
from fsdp_shard.cli.push_command import default_settings
from fsdp_shard.config import ConvertConfig
from fsdp_shard.errors import ConfigError, InputError
from fsdp_shard.evaluation import make_card, read_subject
from tests.support.commands import FSDP_SHARD, environment, run
from tests.support.hub_stand_in import Failure, HubStandIn, push, push_variables, work_directories
from tests.support.runs import run_recipe

_MODEL = "model.safetensors"
_DOWNLOAD = "import sys, huggingface_hub; huggingface_hub.snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
_ATTACK = "<script>alert(1)</script> | [x](http://example.com) `y`\n# z"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.long
def test_a_run_is_pushed_and_loads_again(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    done = push(hub, tmp_path, f"{trained / 'run'}@best", "org/name", "--evaluations", trained / "evaluated")
    assert done.status == 0, done.err
    assert "org/name: created, private" in done.out
    assert f"in {hub.url}/org/name/commit/" in done.out
    assert hub.repositories["org/name"].private
    assert {"config.json", "generation_config.json", "tokenizer.json", _MODEL} <= set(
        hub.repositories["org/name"].files
    )
    assert work_directories(tmp_path) == []

    local = tmp_path / "local"
    fetched = run([sys.executable, "-c", _DOWNLOAD, "org/name", local], tmp_path, **push_variables(hub, tmp_path))
    assert fetched.status == 0, fetched.err
    expected = locate(f"{trained / 'run'}@best").index
    loaded = AutoModelForCausalLM.from_pretrained(local, dtype="auto").state_dict()
    assert expected.tensors
    for name in expected.tensors:
        assert torch.equal(loaded[name], expected.read(name)), name
    assert AutoTokenizer.from_pretrained(local)("abc").input_ids

    card = ModelCard.load(local / "README.md")
    perplexity = next(one for one in card.data.eval_results or [] if one.dataset_name == "held.jsonl")
    result = json.loads((trained / "evaluated" / "result.json").read_text())
    assert perplexity.metric_value == result["perplexity"]
    low, high = result["confidence_interval"]["perplexity"]
    assert perplexity.metric_args is not None
    assert perplexity.metric_args["confidence_interval_95"] == [low, high]
    assert result["provenance"]["weights"]["digest"] in card.text
    assert "| optim.lr | 0.0123 |" in card.text
    assert "| shard |" not in card.text, "only what is not the default"
    assert f"| 4 | {_loss(trained, 4)}" in card.text
    assert str(trained) not in card.text, "no directories of the machine that pushes"


def _loss(trained: Path, step: int) -> str:
    rows = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    return f"{rows[step - 1]['loss']:#.4g}"


@pytest.mark.long
def test_pushing_again_sends_what_differs(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    model = trained / "tiny"
    assert push(hub, tmp_path, model, "org/name").status == 0
    first = dict(hub.put)
    assert first
    again = push(hub, tmp_path, model, "org/name")
    assert again.status == 0, again.err
    assert hub.put == first
    assert (
        f"{_MODEL}           unchanged" in again.out.replace("  ", " ").replace("   ", " ") or "unchanged" in again.out
    )

    files = hub.repositories["org/name"].files
    files["model-00001-of-00002.safetensors"] = b"of an earlier model"
    files["README.md"] = b"my own words"
    hub.fail = lambda method, path, count: Failure(503) if "/commit/" in path else None
    failed = push(hub, tmp_path, f"{trained / 'run'}@latest", "org/name")
    (kept,) = work_directories(tmp_path)
    assert failed.status == 1
    assert f"{kept} is kept for the next push" in failed.err
    assert "the hub fails (HTTP 503)" in failed.err
    hub.fail = lambda method, path, count: None
    third = push(hub, tmp_path, f"{trained / 'run'}@latest", "org/name")
    assert third.status == 0, third.err
    assert f"continuing with {kept}" in third.out
    assert "deleted: it is of an earlier model" in third.out
    assert "README.md in the repository was not written by fsdp-shard" in third.out
    files = hub.repositories["org/name"].files
    assert "model-00001-of-00002.safetensors" not in files
    assert files["README.md"] == b"my own words"


def test_a_readme_of_the_source_is_pushed_as_it_is(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    model = shutil.copytree(trained / "tiny", tmp_path / "model")
    (model / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    (model / "notes.txt").write_text("not of the model")
    done = push(hub, tmp_path, model, "org/name", "--public", "--revision", "v1", "--message", "The first one")
    assert done.status == 0, done.err
    repository = hub.repositories["org/name"]
    pushed = repository.commits[repository.branches["v1"]]
    assert not repository.private
    assert pushed["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    assert pushed[_MODEL] == (model / _MODEL).read_bytes()
    assert "notes.txt" not in pushed
    assert repository.messages == ["The first one"]
    assert _MODEL not in repository.files, "main is as it was"


@pytest.mark.long
def test_adapters_are_merged_or_pushed_as_such(
    tiny_model: Path, texts: Path, trained: Path, hub: HubStandIn, tmp_path: Path
) -> None:
    settings = (f"model.path={tiny_model}", f"data.path={texts / 'train.txt'}", "train.steps=1", "adapter=lora")
    lora = run_recipe("finetune", tmp_path / "lora", *settings)
    assert lora.status == 0, lora.err
    merged = push(hub, tmp_path, "lora", "org/merged")
    assert merged.status == 0, merged.err
    assert _MODEL in hub.repositories["org/merged"].files
    alone = push(hub, tmp_path, "lora", "org/alone", "--adapter", "org/base")
    assert alone.status == 0, alone.err
    files = hub.repositories["org/alone"].files
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(files)
    assert _MODEL not in files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    assert "base_model: org/base" in files["README.md"].decode()
    assert "AutoPeftModelForCausalLM" in files["README.md"].decode()
    refused = push(hub, tmp_path, trained / "tiny", "org/name", "--adapter", "org/base")
    assert refused.status == 2
    assert "is not an adapter" in refused.error


@pytest.mark.long
def test_nothing_is_published_unasked(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    hub.create("org/public", private=False)
    hub.create("org/private", private=True)
    refused = push(hub, tmp_path, trained / "tiny", "org/public")
    assert refused.status == 2
    assert "org/public exists and is public, so a push would publish the model" in refused.error
    assert list(hub.repositories["org/public"].files) == [".gitattributes"]
    assert push(hub, tmp_path, trained / "tiny", "org/public", "--public").status == 0
    kept = push(hub, tmp_path, trained / "tiny", "org/private", "--public")
    assert "org/private: exists, and stays private" in kept.out
    assert hub.repositories["org/private"].private


def test_the_base_of_an_adapter_is_not_published_as_the_model(hub: HubStandIn, tmp_path: Path) -> None:
    tensors = {f"base_model.model.q.{name}.weight": torch.ones(4, 4) for name in ("base_layer", "lora_A", "lora_B")}
    (tmp_path / "model").mkdir()
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    done = push(hub, tmp_path, tmp_path / "model", "org/name")
    assert done.status == 2
    assert "model holds 2 tensors of an adapter together with the weights of its base" in done.error
    assert not hub.repositories


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "path", "said"),
    [
        (401, "/api/whoami-v2", "does not accept the token"),
        (403, "/api/repos/create", "the token may not write there"),
        (404, "/api/models/org/name/preupload/main", "no such repository or branch"),
        (409, "/api/models/org/name/commit/main", "at the same time"),
        (413, "/api/models/org/name/commit/main", "larger than the hub takes"),
    ],
)
def test_refusals_are_one_sentence(
    trained: Path, hub: HubStandIn, tmp_path: Path, status: int, path: str, said: str
) -> None:
    hub.fail = lambda method, asked, count: Failure(status, message="words of the hub") if asked == path else None
    done = push(hub, tmp_path, trained / "tiny", "org/name")
    assert done.status == 1
    assert done.error.startswith("error: org/name ")
    assert said in done.error
    assert f"(HTTP {status}: " in done.error
    assert "words of the hub" in done.error
    assert done.error.endswith("The same command resumes where it stopped.")


@pytest.mark.long
def test_waits_when_the_hub_asks_for_it(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    limited = ("/api/whoami-v2", "/api/models/org/name/commit/main")
    wait = Failure(429, {"Retry-After": "0"})
    hub.fail = lambda method, path, count: wait if path in limited and count == 0 else None
    done = push(hub, tmp_path, trained / "tiny", "org/name")
    assert done.status == 0, done.err
    assert done.err.count("the hub asks for fewer requests (HTTP 429): waiting 0 s, attempt 1 of 4") == 2
    assert _MODEL in hub.repositories["org/name"].files

    hub.fail = lambda method, path, count: wait if path == "/api/whoami-v2" else None
    hub.asked.clear()
    done = push(hub, tmp_path, trained / "tiny", "org/name")
    assert done.status == 1
    assert "still asks for fewer requests" in done.err
    assert hub.asked.count(("GET", "/api/whoami-v2")) == 4

    hub.fail = lambda method, path, count: Failure(429, {"Retry-After": "86400"}) if "whoami" in path else None
    hub.asked.clear()
    done = push(hub, tmp_path, trained / "tiny", "org/name")
    assert done.status == 1
    assert "asks to wait 86400 s, which is too long" in done.error
    assert hub.asked.count(("GET", "/api/whoami-v2")) == 1


@pytest.mark.long
def test_a_push_that_is_killed_in_a_file_goes_on(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    # Converted once more, to know its digest: a conversion writes the same bytes each time.
    convert(f"{trained / 'run'}@best", tmp_path / "model")
    content = (tmp_path / "model" / _MODEL).read_bytes()
    large = _digest(content)
    hub.stalls = True
    hub.fail = lambda method, path, count: Failure(cut_after=50_000) if path.endswith(large) else None
    command = [*map(str, FSDP_SHARD), "push", f"{trained / 'run'}@best", "org/name"]
    variables = environment() | push_variables(hub, tmp_path)
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL) as process:
        assert hub.reached.wait(60)
        while len(hub.blobs) < 3:  # tokenizer, manifest and README.md, which huggingface_hub sends at the same time
            time.sleep(0.02)
        process.kill()
    (kept,) = work_directories(tmp_path)
    before = dict(hub.put)
    assert before[large] == 50_000
    assert _MODEL not in hub.repositories["org/name"].files

    hub.fail = lambda method, path, count: None
    done = run(command, tmp_path, **push_variables(hub, tmp_path))
    assert done.status == 0, done.err
    assert f"continuing with {kept}" in done.out
    assert not kept.exists()
    assert hub.repositories["org/name"].files[_MODEL] == content
    sent = {digest: count - before.get(digest, 0) for digest, count in hub.put.items()}
    assert {digest: count for digest, count in sent.items() if count} == {large: len(content)}, "only what was missing"


@pytest.mark.long
def test_two_pushes_of_a_run_at_once_share_its_conversion(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def hold(method: str, path: str, count: int) -> None:
        if "org/first/commit" in path or "org/first/preupload" in path:
            waits.set()
            goes_on.wait(60)

    hub.fail = hold
    command = [*map(str, FSDP_SHARD), "push", f"{trained / 'run'}@best", "org/first"]
    variables = environment() | push_variables(hub, tmp_path)
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL) as process:
        assert waits.wait(60)
        (kept,) = work_directories(tmp_path)
        second = push(hub, tmp_path, f"{trained / 'run'}@best", "org/second")
        assert second.status == 0, second.err
        assert f"continuing with {kept}" in second.out
        assert kept.exists(), "the first push still needs it"
        goes_on.set()
        assert process.wait(60) == 0
    assert work_directories(tmp_path) == []
    assert hub.repositories["org/first"].files[_MODEL] == hub.repositories["org/second"].files[_MODEL]


@pytest.mark.slow  # huggingface_hub makes six attempts, in 23 s
def test_a_connection_that_is_cut_each_time_is_told(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    hub.fail = lambda method, path, count: Failure(cut_after=1000) if method == "PUT" else None
    done = push(hub, tmp_path, trained / "tiny", "org/name")
    assert done.status == 1
    last = done.err.splitlines()[-1]
    assert "org/name is not complete: the connection to the hub failed" in last
    assert last.endswith("The same command resumes where it stopped.")


@pytest.mark.long
def test_what_is_missing_is_told(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    model = trained / "tiny"
    for variables, said in (
        ({"HF_TOKEN": ""}, "log in with `hf auth login`, or set HF_TOKEN"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"),
    ):
        done = push(hub, tmp_path, model, "org/name", **variables)
        assert (done.status, hub.asked) == (2, [])
        assert said in done.error
    done = push(hub, tmp_path, model, "org/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.status == 1
    assert "the connection to the hub failed" in done.error
    for name in (
        "name",
        "org/na--me",
        "org/../x",
        "a/b/c",
        "org/na me",
        "org/name.git",
        "org-/name",
        f"{'o' * 97}/name",
    ):
        with pytest.raises(ConfigError, match="is not the name of a repository"):
            push_to_hub(model, name)
    with pytest.raises(ConfigError, match="is not the name of a branch"):
        push_to_hub(model, "org/name", revision="../x")
    done = push(hub, tmp_path, f"{trained / 'run'}", "org/name", "--evaluations", trained / "run")
    assert done.status == 2
    assert "There is no evaluation of the weights that are pushed" in done.error


def test_nothing_from_files_is_markup(trained: Path, tmp_path: Path) -> None:
    path = shutil.copytree(trained / "run", tmp_path / "<b>[run](x)")
    config = locate(f"{path}@best").weights / "run_config.yaml"
    config.write_text(config.read_text().replace("run_dir: ", f"hostile: {json.dumps(_ATTACK)}\nrun_dir: "))
    evaluated = shutil.copytree(trained / "evaluated", tmp_path / "evaluated")
    result = json.loads((evaluated / "result.json").read_text())
    result["provenance"]["data"].update(path="<img src=x>: |\nlicense: mit", kind="a: b\n---\n", digest="[]{}\n---")
    (evaluated / "result.json").write_text(json.dumps(result))
    target, source = HubTarget("org/name"), locate(f"{path}@best")
    subject, problems = read_subject(target, source, None, default_settings, [str(evaluated)])
    assert len(problems) == 1
    assert "has them in another size" in problems[0], "the settings"
    card = make_card(subject)
    (tmp_path / "README.md").write_text(card)
    read = ModelCard.load(tmp_path / "README.md")
    assert read.data.license is None
    assert read.text.count(CARD_MARK) == 1
    text = read.text.replace(CARD_MARK, "")
    assert "alert" in text
    assert "<" not in text.replace("\\<", "")
    assert "](" not in text.replace("\\]", "")
    assert "://" not in text
    assert all(line.startswith("|") for line in text.splitlines() if "alert" in line)
    (results,) = {one.dataset_name for one in read.data.eval_results or [] if "img" in one.dataset_name}
    assert results.startswith("<img src=x>")


def test_evaluations_of_other_weights_are_left_out(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no evaluation of the weights"):
        read_subject(HubTarget("org/name"), locate(trained / "tiny"), None, default_settings, [str(trained)])
    both = [str(trained / "evaluated"), str(trained / "run")]
    subject, problems = read_subject(
        HubTarget("org/name"), locate(f"{trained / 'run'}@best"), None, default_settings, both
    )
    assert len(subject.evaluations) == 1
    assert problems == ["1 run, not evaluated with these weights: run."]


@pytest.mark.long
def test_convert_pushes(trained: Path, hub: HubStandIn, tmp_path: Path) -> None:
    command = [*FSDP_SHARD, "convert", f"source={trained / 'run'}@best", "push_to=org/name", "run_dir=c"]
    hub.fail = lambda method, path, count: Failure(403) if path == "/api/repos/create" else None
    refused = run([*command, "target=first"], tmp_path, **push_variables(hub, tmp_path))
    assert refused.status == 1
    assert "org/name cannot be created: the token may not write there" in refused.error
    assert not (tmp_path / "first").exists()

    hub.fail = lambda method, path, count: Failure(409) if "/commit/" in path else None
    stopped = run([*command, "target=second"], tmp_path, **push_variables(hub, tmp_path))
    assert stopped.status == 1
    assert "second is complete: `fsdp-shard push second org/name` continues with it." in stopped.error
    hub.fail = lambda method, path, count: None
    before = dict(hub.put)
    done = push(hub, tmp_path, "second", "org/name")
    assert done.status == 0, done.err
    assert hub.put.keys() == before.keys()
    assert "| optim.lr | 0.0123 |" in hub.repositories["org/name"].files["README.md"].decode()

    done = run([*command, "target=third", "dtype=bfloat16"], tmp_path, **push_variables(hub, tmp_path))
    assert done.status == 0, done.err
    pushed = json.loads((tmp_path / "c" / "result.json").read_text())["pushed"]
    assert pushed["url"].startswith(f"{hub.url}/org/name/commit/")
    assert hub.repositories["org/name"].files[_MODEL] == (tmp_path / "third" / _MODEL).read_bytes()


def test_settings_of_convert_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="push_public=true needs push_to"):
        ConvertConfig(source="a", target="b", push_public=True).check("")
    with pytest.raises(ConfigError, match="needs format=huggingface"):
        ConvertConfig(source="a", target="b", push_to="org/name", format="dcp").check("")
    with pytest.raises(ConfigError, match="push_to=name is not the name of a repository"):
        ConvertConfig(source="a", target="b", push_to="name").check("")
    nothing = ConvertReport("huggingface", "huggingface", 0, 0, 0.0, 0, True, {})
    assert push_converted(ConvertConfig(source="a", target="b"), nothing) == {}
