"""Steps on a remote store: who uploads what, what is refused, and what is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from fsdp_shard.checkpoint.config import CheckpointConfig, ConvertSettings
from fsdp_shard.checkpoint.location import locate
from fsdp_shard.checkpoint.remote.download import fetch_latest, fetch_step, local_copy
from fsdp_shard.checkpoint.remote.same_run import check_same_run
from fsdp_shard.checkpoint.remote.store import RemoteStore
from fsdp_shard.checkpoint.remote.upload import prune_remote, upload_step
from fsdp_shard.checkpoint.steps.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from fsdp_shard.checkpoint.steps.step_store import StepStore
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.errors import CheckpointError, ConfigError, RemoteError, SaveError
from fsdp_shard.utils import check
from tests.checkpoint.remotes import Shelf, s3_server, shelf
from tests.faults.saves import WORLD_SIZE, problems, save_on
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/bucket/run", "not the address"),
        ("s3://", "not the address"),
        ("file:///disk/run", "give it as run_dir"),
        ("s3://key:a-password@bucket/run", "credentials and endpoint come from the environment"),
        ("s3://bucket/run?versionId=1", "credentials and endpoint come from the environment"),
    ],
)
def test_an_address_that_cannot_be_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.remote.*{said}") as raised:
        CheckpointConfig(remote=url).check("checkpoint.")
    assert "a-password" not in str(raised.value)


def test_what_cannot_be_had_with_a_remote_store_says_so() -> None:
    with pytest.raises(ConfigError, match=r"keep_optimizer_last=2 cannot be combined with checkpoint\.remote"):
        CheckpointConfig(remote="s3://bucket/run", keep_optimizer_last=2).check("checkpoint.")
    with pytest.raises(ConfigError, match=r"target=s3://bucket/new .* convert into a local directory"):
        check(ConvertSettings(source="x", target="s3://bucket/new"))
    with pytest.raises(ConfigError, match="fsspec does not support nonsense://"):
        RemoteStore("nonsense://bucket/run")


def save(context: DistributedContext, root: Path, url: str) -> None:
    """Two steps, both uploaded; the second one once more, to no effect, and another one of its number."""
    store, remote = StepStore(root), RemoteStore(url)
    save_on(context, root, range(1, 3), layout="sharded", small=True)
    for step in (1, 2, 2):
        upload_step(context, remote, step, store.path(step))
    with pytest.raises(SaveError, match=r"step-00000002 exists already, from another run"):
        upload_step(context, remote, 2, store.path(1))


@pytest.fixture(params=["shelf", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A remote run with two steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "shelf":
        address = shelf(tmp_path) + "/run"
        on_ranks(WORLD_SIZE, save, tmp_path / "checkpoints", address)
        yield address
        return
    with s3_server() as bucket:
        on_ranks(WORLD_SIZE, save, tmp_path / "checkpoints", f"{bucket}/run")
        yield f"{bucket}/run"


@pytest.mark.long
def test_steps_are_listed_fetched_and_deleted(url: str, tmp_path: Path) -> None:
    remote = RemoteStore(url)
    assert remote.steps() == [1, 2]
    copy = local_copy(url)
    assert copy.name == "step-00000002"
    assert problems(copy.parent) == []
    here = copy.stat().st_ino
    assert local_copy(f"{url}/step-00000002/").stat().st_ino == here, "it is downloaded once"
    assert local_copy(f"{url}/step-00000001").name == "step-00000001"
    with pytest.raises(CheckpointError, match="step-00000003 has no finished checkpoint"):
        local_copy(f"{url}/step-00000003")

    saved = StepStore(tmp_path / "checkpoints").path(2)
    size = (saved / "trainer.json").stat().st_size
    remote.put(4, saved, ["trainer.json"])
    assert remote.steps() == [1, 2], "a step without a manifest is not there"
    with pytest.raises(RemoteError, match=r"step-00000004/config\.json has no bytes"):
        remote.commit(4, b"{}", {"trainer.json": size, "config.json": 1})
    remote.set_best(1)
    assert prune_remote(remote, 5, 1, None) == [], "the best step and the last one"
    assert remote._all_steps() == [1, 2], "what an interrupted upload left is gone"
    assert locate(f"{url}@best").weights.name == locate(f"{url}@1").weights.name == "step-00000001"
    with pytest.raises(CheckpointError, match=r"run has no step 7: its steps are 1, 2, the best is 1"):
        locate(f"{url}@step-7")
    remote.set_best(2)
    assert prune_remote(remote, 5, 1, None) == [1]
    assert remote._all_steps() == [2]


def test_the_next_latest_is_read_if_a_step_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = shelf(tmp_path) + "/run"
    on_ranks(WORLD_SIZE, save, tmp_path / "checkpoints", url)
    fetch, fetched = RemoteStore.fetch, list[int]()

    def deleting(remote: RemoteStore, step: int, name: str, target: Path) -> None:
        fetched.append(step)
        if len(fetched) == 2:
            remote.delete(2)
        fetch(remote, step, name, target)

    monkeypatch.setattr(RemoteStore, "fetch", deleting)
    assert local_copy(url).name == "step-00000001"
    assert fetched[:3] == [2, 2, 1]
    with pytest.raises(CheckpointError, match="step-00000002 has no finished checkpoint"):
        local_copy(f"{url}/step-00000002")


@pytest.mark.long
def test_what_was_changed_there_is_refused(url: str, tmp_path: Path) -> None:
    remote = RemoteStore(url)
    names = [name for name in remote._sizes(2) if name != MANIFEST]
    assert len(names) >= 6
    for name in names:
        path = remote._path(2, name)
        content = remote._fs.cat_file(path)
        remote._fs.pipe_file(path, content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="step-00000002 is not what was uploaded, and nothing of it was kept"):
            local_copy(url)
        remote._fs.rm_file(path)
        with pytest.raises(RemoteError, match=f"step-00000002/{name} cannot be read"):
            local_copy(url)
        remote._fs.pipe_file(path, content)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    manifest = remote.manifest(2)
    digit = b"1" if manifest[-9:-8] == b"0" else b"0"
    remote._fs.pipe_file(remote._path(2, MANIFEST), manifest[:-9] + digit + manifest[-8:])
    with pytest.raises(CheckpointError, match=rf"step-00000002/{MANIFEST}.* not "):
        local_copy(url)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\\b", "", "manifest.json", "./x"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    remote = RemoteStore(shelf(tmp_path) + "/run")
    manifest = Manifest("sharded", 1, files={name: FileRecord(1, "0")})
    remote.commit(1, manifest.to_json().encode(), {})
    with pytest.raises(CheckpointError, match="not a valid name in a checkpoint; nothing was downloaded"):
        fetch_step(remote, 1, tmp_path / "copy" / "step-00000001", replace=False)
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"shelf", "copy", "run", "step-00000001", MANIFEST}


def test_a_store_that_fails_is_one_error_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-tests")

    def fail(operation: str, path: str) -> None:
        raise RuntimeError(f"500 for\n  a-secret-of-the-tests at {os.path.basename(path)}")

    monkeypatch.setattr(Shelf, "before", staticmethod(fail))
    with pytest.raises(RemoteError, match=r"/run cannot be listed: RuntimeError: 500 for \*\*\* at run$"):
        RemoteStore(shelf(tmp_path) + "/run").steps()


def test_an_s3_server_that_fails_is_one_error_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a")
    with s3_server() as bucket:
        with pytest.raises(RemoteError, match="there is no bucket another, or it cannot be reached") as missing:
            RemoteStore("s3://another/run").steps()
        with pytest.raises(RemoteError, match="step-00000001/a could not be written: FileNotFoundError") as refused:
            RemoteStore("s3://another/run").put(1, tmp_path, ["a"])
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(RemoteError, match=r"step-00000001/a could not be written: ") as unreachable:
            RemoteStore(f"{bucket}/run").put(1, tmp_path, ["a"])
        for raised in (missing, refused, unreachable):
            assert "a-secret-of-the-tests" not in str(raised.value)
            assert "\n" not in str(raised.value)


def _rewrite_trainer(step: Path, **values: object) -> None:
    """Give a step another trainer.json, and the manifest that it then has."""
    path, manifest = step / "trainer.json", read_manifest(step)
    assert manifest is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    manifest.files["trainer.json"] = FileRecord(path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes()))
    (step / MANIFEST).write_text(manifest.to_json())


def _save_runs(context: DistributedContext, place: Path, url: str) -> None:
    """Three steps of a run, of which the second is uploaded."""
    save_on(context, place / "run", range(1, 4), layout="sharded", small=True)
    upload_step(context, RemoteStore(url), 2, StepStore(place / "run").path(2))


def test_steps_of_another_run_are_neither_fetched_nor_added_to(tmp_path: Path) -> None:
    url = shelf(tmp_path) + "/run"
    on_ranks(WORLD_SIZE, _save_runs, tmp_path, url)
    remote, store = RemoteStore(url), StepStore(tmp_path / "run")
    check_same_run(remote, store)
    store.delete(2)
    check_same_run(remote, store)  # each keeps other steps
    _rewrite_trainer(store.path(3), seed=9)
    with pytest.raises(ConfigError, match=r"step-00000002 is of another run than .*step-00000003: their seed differs"):
        fetch_latest(remote, store)
    for step in store.steps():
        store.delete(step)
    assert fetch_latest(remote, store) == 2
    manifest = read_manifest(store.path(2))
    assert manifest is not None
    name = next(iter(manifest.tensors))
    manifest.tensors[name] = replace(manifest.tensors[name], digest="0" * 32)
    (store.path(2) / MANIFEST).write_text(manifest.to_json())
    with pytest.raises(ConfigError, match="their weights differ"):
        check_same_run(remote, store)
    assert store.steps() == remote.steps() == [2]


def _upload_two(context: DistributedContext, place: Path, url: str) -> None:
    save_on(context, place / "run", range(1, 4), layout="sharded", small=True)
    for step in (2, 3):
        upload_step(context, RemoteStore(url), step, StepStore(place / "run").path(step))


@pytest.mark.parametrize(("best", "fetched"), [(3, [3]), (2, [2, 3]), (1, [3])], ids=["latest", "earlier", "gone"])
def test_the_best_step_is_fetched_with_the_latest(tmp_path: Path, best: int, fetched: list[int]) -> None:
    url = shelf(tmp_path) + "/run"
    on_ranks(WORLD_SIZE, _upload_two, tmp_path, url)
    RemoteStore(url).set_best(best)
    store = StepStore(tmp_path / "other")
    assert fetch_latest(RemoteStore(url), store) == 3
    assert (store.steps(), store.latest()) == (fetched, 3)
    assert store.best() == (best if best in fetched else None)
