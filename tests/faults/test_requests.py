"""Nothing in a checkpoint leads to a request, a download or native code: whatever its files name, sockets stay closed.

All in one process, in which a module stands in for `kernels`, the package that loads native code from a hub.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_shard import convert, load_dispatched
from fsdp_shard.cli import load_recipe, run_command
from fsdp_shard.config import COMMANDS, compose_jobs
from fsdp_shard.errors import CheckpointError, ModelError
from fsdp_shard.models import load_tokenizer
from tests.support.commands import ROOT, run
from tests.support.runs import RECIPES
from tests.support.tiny import save_adapter

_STAND_INS = Path(__file__).parent / "harness" / "stand_ins"
_KERNEL, _NESTED = "org/kernel:forward", {"": "kernels-community/flash-attn2", "text_config": "org/kernel"}
_CONFIGS: dict[str, dict[str, Any]] = {
    "attention of a hub": {"_attn_implementation": _KERNEL},
    "attention of a hub, the public name": {"attn_implementation": "kernels-community/flash-attn2@v1"},
    "attention of a hub, the internal name": {"_attn_implementation_internal": _KERNEL},
    "paged attention": {"_attn_implementation": "paged|kernels-community/flash-attn2"},
    "attention that falls back on a kernel": {"_attn_implementation": "flash_attention_2"},
    "attention of each part": {"attn_implementation": _NESTED},
    "attention of no hub": {"attn_implementation": "nonsense"},
    "experts": {"_experts_implementation": "sonicmoe"},
    "experts, the public name": {"experts_implementation": {"": "deepgemm", "text_config": "org/kernel"}},
    "attentions of each layer": {"output_attentions": True},
    "code": {"auto_map": {"AutoConfig": "org/code--c.C", "AutoModelForCausalLM": "org/code--m.M"}},
    "cached keys": {"cache_implementation": "quantized"},
    "compiled decoding": {"cache_implementation": "static"},
}
# What each command does with a config is the same; so all commands run with these names at once.
_ALL = {"_attn_implementation": _KERNEL, "experts_implementation": "deepgemm", "cache_implementation": "quantized"}
_GENERATION: dict[str, dict[str, Any]] = {
    "cached keys in another package": {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}},
    "compiled decoding": {"cache_implementation": "static"},
    "a loop of its own": {"custom_generate": "org/code"},
    "more weights": {"use_mtp": True},
    "a method on the hub": {"penalty_alpha": 0.6, "top_k": 4},
    "another method on the hub": {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0},
}
# What a config asks for when it is read, and what settings of a tokenizer would open; `OUTSIDE` is a file elsewhere.
_VISION = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
_REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a backbone": ("config.json", {"model_type": "detr", "backbone": "org/name", "use_timm_backbone": False}),
    "the backbone of a part": (
        "config.json",
        _VISION | {"vision_config": {"model_type": "detr", "backbone": "org/name", "use_timm_backbone": False}},
    ),
    "another config": ("config.json", {"configuration_files": ["../config.4.0.0.json"]}),
    "a vocabulary": ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "vocab": "OUTSIDE"}),
    "a vocabulary, by the other file": ("special_tokens_map.json", {"vocab": "OUTSIDE"}),
    "a tokenizer": ("tokenizer_config.json", {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]}),
    "arguments": ("tokenizer_config.json", {"init_inputs": ["OUTSIDE"]}),
    "a sentencepiece model": ("tokenizer_config.json", {"sp_model_kwargs": {"model_file": "OUTSIDE"}}),
    "a dictionary": ("tokenizer_config.json", {"mecab_kwargs": {"mecab_option": "-d /OUTSIDE"}}),
}
_ADDRESSES = (
    *("http://host/model", "s3://bucket/run", "zip://a::file://b", "hf://org/name", "file:///etc", "memory://x"),
    *("github://org:repo@main/x", "simplecache::http://host/x", "s3://bucket/run@step-3", "org/name"),
)


def test_no_file_of_a_model_leads_to_a_request_or_native_code(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    script = "import sys; from tests.faults import test_requests as t; t.child(*sys.argv[1:])"
    calls = tmp_path / "calls"
    done = run(
        [sys.executable, "-c", script, tiny_model, texts, tmp_path, calls],
        tmp_path,
        PYTHONPATH=f"{_STAND_INS}:{ROOT}",
        KERNEL_CALLS=str(calls),
        HF_HUB_OFFLINE="0",
    )
    assert done.status == 0, done.err[-3000:]
    found = json.loads(done.out)
    assert found == [], "\n".join(found)


def child(tiny_model: str, texts: str, place: str, calls: str) -> None:
    """Print what went wrong, or was asked for, in any of the cases."""
    requests: list[str] = []
    sys.addaudithook(lambda event, args: _refuse(requests, event, args))
    commands, found = _commands(Path(texts), Path(place)), []
    cases = [(name, "config.json", values) for name, values in _CONFIGS.items()]
    cases += [(name, "generation_config.json", values) for name, values in _GENERATION.items()]
    cases.append(("all commands", "config.json", _ALL))
    for number, (name, file, values) in enumerate(cases):
        model = shutil.copytree(tiny_model, Path(place) / f"model-{number}")
        document = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(document | values))
        for command, call in commands.items():
            if values is not _ALL and command not in ("load", "generate"):
                continue
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
                try:
                    call(model)
                except Exception as error:
                    found.append(f"{name}, {command}: {type(error).__name__}: {error}")
            asked = Path(calls).read_text() if Path(calls).exists() else ""
            found += [f"{name}, {command}: {what}" for what in (*requests, asked) if what]
            requests.clear()
            Path(calls).unlink(missing_ok=True)
    found += _not_refused(Path(tiny_model), Path(place), requests)
    found += _unseen(Path(tiny_model), Path(calls), requests)
    print(json.dumps(found))


def _not_refused(tiny_model: Path, place: Path, requests: list[str]) -> list[str]:
    """What files ask for and get; the error has to name the file."""
    found, outside = [], place / "words.txt"
    outside.write_text("secret\n")
    for name, (file, values) in _REFUSED.items():
        model = place / f"refused {name}"
        shutil.copytree(tiny_model, model)
        document = json.loads((model / file).read_text()) if (model / file).exists() else {}
        (model / file).write_text(json.dumps(document | values).replace("OUTSIDE", str(outside)))
        try:
            load_dispatched(model)
            load_tokenizer(model)
            found.append(f"{name}: it was not refused")
        except ModelError as error:
            found += [] if str(model) in str(error) else [f"{name}: {error}"]
        found += [f"{name}: {what}" for what in requests]
        requests.clear()
    return found


def _refuse(requests: list[str], event: str, args: Any) -> None:
    if event in ("socket.connect", "socket.getaddrinfo") and (event != "socket.connect" or isinstance(args[1], tuple)):
        requests.append(f"{event} {args[1:]}")
        raise OSError("no request is allowed")


def _commands(texts: Path, place: Path) -> dict[str, Callable[[Path], object]]:
    text = [f"data.path={texts}/held_out.txt", "data.sequence_length=16"]
    train = [*text, "train.steps=1", "launch.device=cpu", f"data.cache_dir={place}/tokens"]
    return {
        "load": lambda model: load_dispatched(model).generate(max_new_tokens=2),
        "logits": lambda model: run_command(["diff", str(model), str(model), "--logits", "Hello"]),
        "convert": lambda model: convert(model, place / f"{model.name}-converted"),
        "generate": _recipe("generate", "checkpoint", ["prompt=Hello", "generation.max_new_tokens=2"], place),
        "evaluate": _recipe("evaluate", "checkpoint", text, place),
        "plan": _recipe("plan", "model.path", [], place),
        "finetune": _recipe("finetune", "model.path", train, place),
    }


def _recipe(command: str, setting: str, arguments: list[str], place: Path) -> Callable[[Path], None]:
    (job,) = compose_jobs(COMMANDS[command], [f"{setting}=x", f"run_dir={place}/run", *arguments], command)
    recipe = load_recipe(RECIPES / f"{command}.py")

    def call(model: Path) -> None:
        config: Any = copy.deepcopy(job.config)
        group, _, name = setting.rpartition(".")
        setattr(getattr(config, group) if group else config, name, str(model))
        config.run_dir = str(model.with_name(f"{model.name}-{command}"))
        Path(config.run_dir).mkdir()
        recipe.check(config)
        recipe.perform(config)

    return call


def _unseen(tiny_model: Path, calls: Path, requests: list[str]) -> list[str]:
    """What of the above would not be seen if it happened: a kernel that transformers loads, a request."""
    import urllib.request

    from transformers import AutoModelForCausalLM

    with contextlib.suppress(ValueError):
        AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="kernels-community/flash-attn2")
    with contextlib.suppress(OSError):
        urllib.request.urlopen("http://127.0.0.1:9/")
    return [name for name, seen in (("a kernel", calls.exists()), ("a request", requests)) if not seen]


def test_an_adapter_does_not_name_an_address_as_its_base(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_model)
    document = json.loads((adapter / "adapter_config.json").read_text())
    requests: list[str] = []
    is_over = False
    sys.addaudithook(lambda event, args: None if is_over else _refuse(requests, event, args))
    try:
        for address in _ADDRESSES:
            (adapter / "adapter_config.json").write_text(json.dumps(document | {"base_model_name_or_path": address}))
            for read in (load_dispatched, lambda path: convert(path, tmp_path / "target")):
                with pytest.raises(CheckpointError, match=r"is an adapter of .*base=") as raised:
                    read(adapter)  # type: ignore[operator]
                assert ("an address" in str(raised.value)) == ("://" in address)
        load_dispatched(adapter, base=tiny_model)
    finally:
        is_over = True
    assert requests == []


def test_a_model_whose_code_downloads_kernels_is_refused_where_they_can_be(tmp_path: Path) -> None:
    script = (
        "from transformers import RwkvConfig; from fsdp_shard.models import build_on_meta\n"
        "build_on_meta(RwkvConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9))"
    )
    environment = {"PYTHONPATH": f"{_STAND_INS}:{ROOT}", "KERNEL_CALLS": str(tmp_path / "calls")}
    with_kernels = run([sys.executable, "-c", script], tmp_path, **environment)
    assert ModelError.__name__ in with_kernels.err
    assert "trust_remote_code=true" in with_kernels.err
    assert run([sys.executable, "-c", script], tmp_path).status == 0
