"""Files that lead elsewhere: to kernels and code on a hub, to addresses, by links to other files, to other settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import Damage

_CONFIG, _GENERATION, _ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
_KERNEL, _NESTED = "org/kernel:forward", {"": "kernels-community/flash-attn2", "text_config": "org/kernel"}
# What a config may name, and which is left out.
_IGNORED: dict[str, tuple[str, dict[str, Any]]] = {
    "attention of a hub": (_CONFIG, {"_attn_implementation": _KERNEL}),
    "attention of a hub, the public name": (_CONFIG, {"attn_implementation": "kernels-community/flash-attn2@v1"}),
    "attention of a hub, the internal name": (_CONFIG, {"_attn_implementation_internal": _KERNEL}),
    "paged attention": (_CONFIG, {"_attn_implementation": "paged|kernels-community/flash-attn2"}),
    "attention that falls back on a kernel": (_CONFIG, {"_attn_implementation": "flash_attention_2"}),
    "attention of each part": (_CONFIG, {"attn_implementation": _NESTED}),
    "attention of no hub": (_CONFIG, {"attn_implementation": "nonsense"}),
    "experts": (_CONFIG, {"_experts_implementation": "sonicmoe"}),
    "experts, the public name": (_CONFIG, {"experts_implementation": {"": "deepgemm", "text_config": "org/kernel"}}),
    "attentions of each layer": (_CONFIG, {"output_attentions": True}),
    "cached keys": (_CONFIG, {"cache_implementation": "quantized"}),
    "compiled decoding": (_CONFIG, {"cache_implementation": "static"}),
    "generation: cached keys in another package": (
        _GENERATION,
        {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}},
    ),
    "generation: compiled decoding": (_GENERATION, {"cache_implementation": "static"}),
    "generation: a loop of its own": (_GENERATION, {"custom_generate": "org/code"}),
    "generation: more weights": (_GENERATION, {"use_mtp": True}),
    "generation: a method on the hub": (_GENERATION, {"penalty_alpha": 0.6, "top_k": 4}),
    "generation: another method on the hub": (
        _GENERATION,
        {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0},
    ),
}
_VISION = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
_BACKBONE = {"model_type": "detr", "backbone": "org/name", "use_timm_backbone": False}
# What a config asks for when it is read.
_ASKED: dict[str, dict[str, Any]] = {
    "a backbone": _BACKBONE,
    "the backbone of a part": _VISION | {"vision_config": _BACKBONE},
    "another config": {"configuration_files": ["../config.4.0.0.json"]},
}
# What settings of a tokenizer would open; OUTSIDE is a file elsewhere.
_OPENED: dict[str, tuple[str, dict[str, Any]]] = {
    "a vocabulary": ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "vocab": "OUTSIDE"}),
    "a vocabulary, by the other file": ("special_tokens_map.json", {"vocab": "OUTSIDE"}),
    "a tokenizer": ("tokenizer_config.json", {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]}),
    "arguments": ("tokenizer_config.json", {"init_inputs": ["OUTSIDE"]}),
    "a sentencepiece model": ("tokenizer_config.json", {"sp_model_kwargs": {"model_file": "OUTSIDE"}}),
    "a dictionary": ("tokenizer_config.json", {"mecab_kwargs": {"mecab_option": "-d /OUTSIDE"}}),
}
ADDRESSES = (
    *("http://host/model", "s3://bucket/run", "zip://a::file://b", "hf://org/name", "file:///etc", "memory://x"),
    *("github://org:repo@main/x", "simplecache::http://host/x", "s3://bucket/run@step-3", "org/name"),
)
_SIDE_FILES = (_CONFIG, _GENERATION, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _named(file: str, values: dict[str, Any]) -> Damage:
    """The file with these values, or made of them."""

    def apply(root: Path) -> None:
        document = json.loads((root / file).read_text()) if (root / file).exists() else {}
        (root / file).write_text(json.dumps(document | values).replace("OUTSIDE", str(root.parent / "secret")))

    return apply


def _linked(file: str) -> Damage:
    """A link to the file, which is outside of the directory."""

    def apply(root: Path) -> None:
        outside = root.parent / "elsewhere"
        outside.mkdir()
        shutil.move(root / file, outside / file)
        (root / file).symlink_to(outside / file)

    return apply


CASES = [
    *(Case(name, damaged("model", _named(*named)), expect="accepted") for name, named in _IGNORED.items()),
    Case(
        "code",
        damaged(
            "model", _named(_CONFIG, {"auto_map": {"AutoConfig": "org/c--c.C", "AutoModelForCausalLM": "org/c--m.M"}})
        ),
        expect="any",
    ),
    *(Case(name, damaged("model", _named(_CONFIG, values)), damages="config") for name, values in _ASKED.items()),
    *(Case(name, damaged("model", _named(*named)), damages="tokenizer") for name, named in _OPENED.items()),
    *(
        Case(f"base {base}", damaged("adapter", _named(_ADAPTER, {"base_model_name_or_path": base})), damages="adapter")
        for base in ADDRESSES
    ),
    *(Case(f"{file} a link out", damaged("model", _linked(file)), damages="links") for file in _SIDE_FILES),
    *(
        Case(f"{file} of a sealed model a link out", damaged("sealed", _linked(file)), damages="links")
        for file in _SIDE_FILES
    ),
    Case("adapter_config.json a link out", damaged("adapter", _linked(_ADAPTER)), damages="adapter"),
    *(
        Case(f"{file} another than was sealed", damaged("sealed", edits.fields(file, magic=1)), damages="sealed")
        for file in _SIDE_FILES[:4]
    ),
    *(
        Case(
            f"{file} of ranks another than was sealed",
            damaged("sharded", edits.fields(file, magic=1)),
            damages="sealed",
        )
        for file in _SIDE_FILES[:4]
    ),
]
