"""Where the bytes are: weights seen in the checkpoint's own files, budgets that are held, blocks fetched ahead."""

from __future__ import annotations

import copy
import gc
import json
import mmap
import multiprocessing
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FunnelConfig,
    FunnelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
)

from fsdp_shard.checkpoint import convert, open_checkpoint, tensor_bytes
from fsdp_shard.errors import RunError
from fsdp_shard.inference.dispatch import load_dispatched
from fsdp_shard.inference.offload import mmap_tensors, page_cache as pages_module
from fsdp_shard.inference.offload.mmap_tensors import MappedFiles
from fsdp_shard.inference.offload.page_cache import FilePages, PageReader
from fsdp_shard.utils import give_back_free_memory
from tests.inference.recorded_stream import Recorder
from tests.support.tiny import token_batch

_FORK = multiprocessing.get_context("fork")
_IDS = token_batch(0, rows=1, length=5)
MB = 1_000_000


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of 16 equal layers, 52 MB of them and little else, in one file, as 2 ranks write it, and as DCP."""
    root = tmp_path_factory.mktemp("offload")
    config = LlamaConfig(
        hidden_size=256, intermediate_size=720, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=257, max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "whole")
    convert(root / "whole", root / "ranks", format="sharded", ranks=2)
    convert(root / "whole", root / "uneven", format="dcp", ranks=3)
    return {name: root / name for name in ("whole", "ranks", "uneven")}


def tokens(model: Any) -> torch.Tensor:
    """Four greedy tokens, so that every block runs four times."""
    found = model.generate(_IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert isinstance(found, torch.Tensor)
    return found


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def mapped_bytes(path: Path) -> int:
    """How much of the files under `path` this process has mapped and in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = str(path) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def in_child(work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns in a forked process, whose memory is then measured from the same start each time."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=lambda: sender.send(work(*args)))
    process.start()
    sender.close()
    assert receiver.poll(100), "the child does not answer"
    answer = receiver.recv()  # EOFError where it failed; it has told why
    process.join()
    return answer


def _run(path: Path, wanted: dict[str, Any], limit: int | None) -> tuple[list[int], int, int]:
    """Tokens, anonymous memory that loading and running added, and the most of the files that was mapped at a time."""
    for used in ({"device_map": "disk"}, wanted):  # what the libraries take at first use, more after other tests
        tokens(load_dispatched(path, **used))
    end = time.monotonic() + 10
    while mapped_bytes(path):  # until the threads that fetch ahead have let go of it
        assert time.monotonic() < end
        gc.collect()
    give_back_free_memory()  # or what is allocated next may lie in pages that are counted already
    before, peaks, grown = status("RssAnon"), [0], [0]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit, resource.RLIM_INFINITY))
    model = load_dispatched(path, **wanted)
    if limit is not None:
        mmap.mmap(-1, limit // 2, flags=mmap.MAP_PRIVATE).close()  # what shows files leaves room to others

    def measure(*_: Any) -> None:
        peaks.append(mapped_bytes(path))
        grown.append(status("RssAnon") - before)

    for number in (0, 7, 15):
        model.get_submodule(f"model.layers.{number}").register_forward_hook(measure)
    return tokens(model).tolist(), max(grown), max(peaks)


@pytest.mark.long
def test_weights_are_seen_in_their_own_files_and_budgets_are_held(sources: dict[str, Path]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(sources["whole"])
    weights = sum(param.nbytes for param in plain.parameters())
    expected = tokens(plain).tolist()
    del plain  # or what it maps would stay in memory for the tests after a failure of this one
    quarter = weights // 4
    budget = {"max_memory": {"cpu": quarter}}

    # A copy of the weights would add all of them; the libraries add some MB, more after other tests.
    found, anonymous, mapped = in_child(_run, sources["whole"], {"device_map": "cpu"}, 20 * MB)
    assert found == expected
    assert anonymous < 0.3 * weights
    assert mapped > 0.9 * weights
    found, anonymous, mapped = in_child(_run, sources["whole"], budget, None)
    assert found == expected
    assert anonymous + mapped < quarter + 4 * MB
    assert mapped > quarter / 2
    # The parts of a matrix meet at pages in these rank files, so they are seen there too.
    found, anonymous, mapped = in_child(_run, sources["ranks"], {"device_map": "cpu"}, 20 * MB)
    assert found == expected
    assert anonymous < 0.3 * weights
    assert mapped > 0.9 * weights
    found, anonymous, mapped = in_child(_run, sources["ranks"], budget, None)
    assert found == expected
    assert anonymous + mapped < quarter + 4 * MB
    assert mapped > quarter / 3
    # In these they do not, and are joined in memory.
    found, anonymous, mapped = in_child(_run, sources["uneven"], budget, None)
    assert found == expected
    assert anonymous + mapped < quarter + 4 * MB
    found, anonymous, _ = in_child(_run, sources["uneven"], {"device_map": "cpu"}, None)
    assert found == expected
    assert anonymous > 0.5 * weights


def _mapped_after_a_prompt(path: Path, budget: int) -> int:
    model = load_dispatched(path, "auto", {"cpu": budget})
    model(token_batch(0, rows=1, length=12))
    return mapped_bytes(path)


def test_what_a_budget_keeps_stays(sources: dict[str, Path]) -> None:
    weights = sum(file.stat().st_size for file in sources["whole"].glob("*.safetensors"))
    assert in_child(_mapped_after_a_prompt, sources["whole"], 2 * weights) > 0.9 * weights


def resident_bytes(pages: FilePages) -> int:
    """Bytes of `pages` in the page cache, to within a few MB."""
    return sum(part.num_bytes for part in pages.parts() if part.is_resident())


@pytest.mark.parametrize("advice", [pages_module._POPULATE_READ, 9999], ids=["populated", "read, as before Linux 5.14"])
def test_pages_come_and_go(sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(pages_module, "_POPULATE_READ", advice)
    with (sources["whole"] / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())  # pages that are still to be written cannot go
    with open_checkpoint(sources["whole"]) as index:
        (pages,) = MappedFiles(index).pages(name for name in index.names if "layers.3." in name)
        pages.drop(from_cache=True)
        gone = resident_bytes(pages)
        PageReader().populate(pages.parts(), is_unmapped=False)
        assert resident_bytes(pages) == pages.num_bytes
    assert gone < pages.num_bytes  # all of it, on file systems that do as they are advised


def test_only_aligned_runs_of_the_wanted_type_are_seen_in_place(tmp_path: Path, sources: dict[str, Path]) -> None:
    entries = {"odd": ("U8", [3]), "shifted": ("F32", [2, 2]), "none": ("F32", [0])}
    header, at = {}, 0
    for name, (dtype, shape) in entries.items():
        size = {"U8": 1, "F32": 4}[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(at)))
    with open_checkpoint(tmp_path) as index:
        files = MappedFiles(index)
        odd = files.view("odd", torch.uint8)
        assert odd is not None
        assert odd.tolist() == [0, 1, 2]
        assert files.view("shifted", torch.float32) is None
        assert files.view("none", torch.float32) is None
    with open_checkpoint(sources["whole"]) as index, open_checkpoint(sources["ranks"]) as joined:
        name = "model.layers.0.mlp.up_proj.weight"
        view = MappedFiles(index).view(name, torch.float32)
        assert view is not None
        assert torch.equal(view, index.read(name))
        view.zero_()  # stays in this process
        assert not torch.equal(view, index.read(name))
        assert MappedFiles(index).view(name, torch.bfloat16) is None
        stitched = MappedFiles(joined).view(name, torch.float32)
        assert stitched is not None
        assert torch.equal(stitched, index.read(name))
        stitched.zero_()  # stays in this process
        assert torch.equal(joined.read(name), index.read(name))
    with open_checkpoint(sources["uneven"]) as index:
        assert MappedFiles(index).view(name, torch.float32) is None


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_blocks_are_fetched_while_others_run(prefetch: int) -> None:
    recorder = Recorder(6, prefetch)
    order = [*range(6)] * 3
    assert recorder.run(*order) == order
    passes = [number for what, number in recorder.events if what == "pass"]
    assert passes == order
    fetched = [number for what, number in recorder.events if what == "fetch"]
    places = [number + 6 * fetched[:at].count(number) for at, number in enumerate(fetched)]
    assert {*range(len(order))} <= {*places} <= {*range(len(order) + prefetch)}  # each once a pass, none twice
    # In order, but that of two which are fetched at once either may begin.
    assert all(abs(place - at) <= prefetch // 2 for at, place in enumerate(places[: len(order)]))
    assert len(recorder.ring._free) <= 1 + prefetch


def test_two_blocks_are_fetched_at_once() -> None:
    """So that the parts of one queue behind those of the other."""
    recorder = Recorder(3, 2)
    recorder.meet = dict.fromkeys((1, 2), threading.Barrier(2))
    assert recorder.run(0, 1, 2) == [0, 1, 2]
    assert not recorder.meet


def test_what_follows_is_learnt() -> None:
    """As with an encoder that runs once and a decoder that runs for each token."""
    recorder = Recorder(6, 2)
    assert recorder.run(0, 1, 2, *[3, 4, 5] * 4) == [0, 1, 2, *[3, 4, 5] * 4]
    recorder.run(3)
    late = [number for what, number in recorder.events[-30:] if what == "fetch"]
    assert set(late[-6:]) == {3, 4, 5}
    assert recorder.run(1, 5, 0, 0, 2) == [1, 5, 0, 0, 2]
    assert len(recorder.ring._free) <= 3


def test_one_pass_at_a_time() -> None:
    """Two threads would get each other's memory: the second is told, and the first goes on."""
    recorder, inside, told = Recorder(2, 1), threading.Event(), threading.Event()
    refused: list[BaseException] = []

    class Waiting(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert told.wait(30)
            return value

    def other() -> None:
        assert inside.wait(30)
        try:
            recorder.run(1)
        except RunError as error:
            refused.append(error)
        told.set()

    recorder.modules[0].register_forward_hook(lambda module, args, output: Waiting()(output), prepend=True)
    thread = threading.Thread(target=other)
    thread.start()
    assert recorder.run(0) == [0]
    thread.join()
    assert "one pass at a time" in str(refused[0])
    inside.clear()
    assert recorder.run(1, 0, 1) == [1, 0, 1]


def test_an_input_without_values_is_refused() -> None:
    recorder = Recorder(1, 0)
    with pytest.raises(RunError, match="A Linear whose weights are streamed got an input without values"):
        recorder.modules[0](torch.ones(1, 2, device="meta"))


def test_a_backward_pass_through_memory_that_was_used_again_is_refused() -> None:
    recorder = Recorder(2, 0)
    value = torch.ones(1, 2, requires_grad=True)
    output = recorder.modules[1](recorder.modules[0](value))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_backward_pass_while_memory_is_read_into_is_refused() -> None:
    recorder, begun, done = Recorder(3, 1), threading.Event(), threading.Event()

    def fill(wanted: Any) -> None:
        for name, out in wanted:
            tensor_bytes(out)[:] = torch.full((2, 2), float(name)).numpy().tobytes()  # unseen by torch, as from a file
            if name == "2":
                begun.set()
                assert done.wait(30)

    recorder.ring.fill_all = fill
    output = recorder.modules[1](recorder.modules[0](torch.ones(1, 2, requires_grad=True)))
    assert begun.wait(30)  # into the memory that the first block had
    try:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    finally:
        done.set()


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by peft
def test_an_adapter_without_values_is_refused(sources: dict[str, Path], target: str) -> None:
    """peft puts its matrices where the weights are: on meta, between passes."""
    model = load_dispatched(sources["uneven"], {"": "cpu", "model.layers": "disk", "lm_head": "disk"})
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(RunError, match=r"has parameters without values.*load_dispatched\(adapters="):
        adapted(_IDS)


def test_a_module_in_a_block_that_does_not_run_is_refused(sources: dict[str, Path]) -> None:
    model = load_dispatched(sources["uneven"], "disk")
    expected = tokens(model)
    with pytest.raises(
        RunError, match="A Linear is called while the LlamaDecoderLayer that it belongs to does not run"
    ):
        model.get_submodule("model.layers.3.mlp")(torch.ones(1, 256))
    assert torch.equal(tokens(model), expected)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("device_map", ["disk", {"": "disk", "model.embed_tokens": "cpu"}])
def test_what_needs_weights_on_disk_is_refused(sources: dict[str, Path], tmp_path: Path, device_map: Any) -> None:
    model: Any = load_dispatched(sources["whole"], device_map, dtype="bfloat16")
    expected = tokens(model)
    casts: list[Callable[[], Any]] = [
        *(model.float, model.double, model.half, model.get_submodule("model").float),
        *(lambda: model.to(torch.float32), lambda: model.to("cpu", dtype=torch.float32)),
    ]
    for cast in casts:
        with pytest.raises(RunError, match="which are read in bfloat16 for each pass, so it cannot become float"):
            cast()
    with pytest.raises(RunError, match=r"save_pretrained cannot write; fsdp-shard convert .* TARGET"):
        model.save_pretrained(tmp_path)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RunError, match="cannot be copied or pickled; load it again by load_dispatched"):
            copied(model)
    assert torch.equal(tokens(copy.copy(model)), expected)
    assert torch.equal(tokens(model.bfloat16()), expected)


def test_a_model_is_copied_if_no_block_is_streamed(sources: dict[str, Path]) -> None:
    model = load_dispatched(sources["whole"], "cpu")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(tokens(copied), tokens(model))
    with pytest.raises(RunError, match="cannot be copied or pickled"):
        pickle.dumps(load_dispatched(sources["whole"], "disk"))


def _refusal(model: Any) -> str:
    with pytest.raises(RunError) as caught:
        tokens(model)
    return str(caught.value)


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(sources: dict[str, Path]) -> None:
    for prefetch in (0, 1):
        model = load_dispatched(sources["whole"], "disk", prefetch_blocks=prefetch)
        expected = tokens(model)
        assert "cannot run in a process that was forked after it was loaded" in in_child(_refusal, model)
        assert torch.equal(tokens(model), expected)


@pytest.mark.parametrize("kind", ["prophetnet", "funnel"])
def test_models_that_use_weights_outside_of_their_module_are_refused(tmp_path: Path, kind: str) -> None:
    if kind == "prophetnet":
        config: Any = ProphetNetConfig(
            hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2,
            num_decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=99,
        )  # fmt: skip
        made: Any = ProphetNetForConditionalGeneration(config)
    else:
        made = FunnelForMaskedLM(
            FunnelConfig(vocab_size=99, block_sizes=[1, 1], d_model=32, n_head=2, d_head=16, d_inner=48)
        )
    made.save_pretrained(tmp_path)
    model = load_dispatched(tmp_path, "disk", dtype="bfloat16")
    inputs = {"input_ids": _IDS % 90, **({"decoder_input_ids": _IDS % 90} if kind == "prophetnet" else {})}
    with pytest.raises(RunError, match=r"by a larger max_memory or a device_map that names it\.$"):
        model(**inputs)


def test_another_working_directory_is_another_model(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sources["whole"].parent)
    model = load_dispatched("whole", "disk", dtype="bfloat16")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(tokens(model), tokens(load_dispatched(sources["whole"], "cpu", dtype="bfloat16")))


def test_the_device_of_an_offloaded_model_is_where_it_computes(sources: dict[str, Path]) -> None:
    """Weights that are read into another dtype are on meta between passes, the embedding first of all."""
    model = load_dispatched(sources["whole"], "disk", dtype="bfloat16")
    assert isinstance(model, LlamaForCausalLM)
    assert model.get_input_embeddings().weight.is_meta
    assert model.device == model.model.device == torch.device("cpu")
    assert model.dtype == torch.bfloat16
    expected = AutoModelForCausalLM.from_pretrained(sources["whole"])
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert tokens(model).device == torch.device("cpu")


def test_a_fetch_that_fails_is_told_to_who_needs_it() -> None:
    recorder = Recorder(4, 2)
    recorder.broken = {2}
    assert recorder.run(0, 1) == [0, 1]
    with pytest.raises(OSError, match="disk is gone"):
        recorder.run(2)
    recorder.broken = set()
    assert recorder.run(2, 3, 0) == [2, 3, 0]


@pytest.fixture(autouse=True)
def _limits_stay() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_mapped_files_are_closed_when_modules_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python ends, what a module has is taken from it before the last model is."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    mapped = mmap_tensors._MappedFile(mmap.mmap(-1, 1), descriptor, 0)
    monkeypatch.setattr(mmap_tensors, "os", None)
    del mapped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
