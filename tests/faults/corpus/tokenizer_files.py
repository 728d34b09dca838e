"""tokenizer.json, tokenizer_config.json and others of a tokenizer: wrong types, ids beyond the vocabulary, no files."""

from __future__ import annotations

from typing import Any

from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import DEEP, DIGITS, Damage

_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"


def _set(**values: Any) -> Damage:
    return edits.fields(_FILE, **values)


def _model(**values: Any) -> Damage:
    return edits.edit(_FILE, lambda document: document["model"].update(values))


def _vocabulary(**values: Any) -> Damage:
    return edits.edit(_FILE, lambda document: document["model"]["vocab"].update(values))


def _added(**values: Any) -> Damage:
    return edits.edit(_FILE, lambda document: document["added_tokens"][0].update(values))


def _settings(**values: Any) -> Damage:
    return edits.fields(_CONFIG, **values)


def _shifted(document: Any) -> None:
    """Every token has an id that is 1,000 larger."""
    document["model"]["vocab"] = {token: number + 1000 for token, number in document["model"]["vocab"].items()}


_MORE = {"id": 256, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_REFUSED: dict[str, Damage] = {
    "cut short": edits.cut(_FILE, 1000),
    "empty": edits.content(_FILE, b""),
    "no UTF-8": edits.content(_FILE, b'{"version": "\xff"}'),
    "a list": edits.content(_FILE, "[]"),
    "deep nesting": edits.literal(_FILE, "normalizer", DEEP),
    "no model": edits.without(_FILE, "model"),
    "model null": _set(model=None),
    "model a text": _set(model="BPE"),
    "an unknown model": _model(type="Magic"),
    "vocab a list": _model(vocab=["a", "b"]),
    "vocab of texts": _vocabulary(a="first"),
    "a negative id": _vocabulary(a=-1),
    "a fractional id": _vocabulary(a=1.5),
    "an id of 2^40": _vocabulary(a=2**40),
    "an id of 5,000 digits": edits.literal(_FILE, "model.vocab.a", DIGITS),
    "merges of unknown tokens": _model(merges=[["zz", "yy"]]),
    "merges of numbers": _model(merges=[[1, 2]]),
    "merges a text": _model(merges="a b"),
    "added tokens a map": _set(added_tokens={"a": 1}),
    "an added token without id": edits.edit(_FILE, lambda document: document["added_tokens"][0].pop("id") and None),
    "an added token of a text id": _added(id="last"),
    "an added token of number": _added(content=7),
    "an unknown normalizer": _set(normalizer={"type": "Magic"}),
    "a normalizer without pattern": _set(normalizer={"type": "Replace"}),
    "a broken pattern": _set(normalizer={"type": "Replace", "pattern": {"Regex": "(("}, "content": "x"}),
    "an unknown pre-tokenizer": _set(pre_tokenizer={"type": "Magic"}),
    "an unknown decoder": _set(decoder={"type": "Magic"}),
    "a post-processor of nothing": _set(post_processor={"type": "TemplateProcessing", "single": [], "pair": []}),
    "padding a text": _set(padding="left"),
    "truncation a list": _set(truncation=[5]),
    "a byte fallback that is a text": _model(byte_fallback="yes"),
    "a directory": edits.directory(_FILE),
    "config: deep nesting": edits.literal(_CONFIG, "comment", DEEP),
    "config: cut short": edits.cut(_CONFIG, 30),
    "config: no UTF-8": edits.content(_CONFIG, b"\xff"),
    "config: a list": edits.content(_CONFIG, "[1]"),
    "config: an integer of 5,000 digits": edits.literal(_CONFIG, "model_max_length", DIGITS),
    "all ids beyond the vocabulary": edits.edit(_FILE, _shifted),
    "no files": edits.both(edits.gone(_FILE), edits.gone(_CONFIG)),
}
_EITHER: dict[str, Damage] = {
    "version unknown": _set(version="9.0"),
    "version a number": _set(version=1),
    "an id twice": _vocabulary(a=5),
    "an id of 10^6": _vocabulary(H=10**6),
    "an added token beyond the vocabulary": _added(id=5000),
    "an added token of 2^31": _added(id=2**31),
    "an added token twice": _set(added_tokens=[_MORE | {"special": True}] * 2),
    "an empty added token": _added(content=""),
    "dropout 7": _model(dropout=7.0),
    "unk_token that is none": _model(unk_token="<unk>"),
    "a FIFO": edits.fifo(_FILE),
    "no tokenizer.json": edits.gone(_FILE),
    "continuing_subword_prefix a number": _model(continuing_subword_prefix=3),
    "config: an unknown class": _settings(tokenizer_class="MagicTokenizer"),
    "config: a class that is a list": _settings(tokenizer_class=["LlamaTokenizer"]),
    "config: a class that is a model": _settings(tokenizer_class="LlamaForCausalLM"),
    "config: a class that is a function": _settings(tokenizer_class="set_seed"),
    "config: model_max_length a text": _settings(model_max_length="long"),
    "config: model_max_length negative": _settings(model_max_length=-1),
    "config: model_max_length infinite": edits.literal(_CONFIG, "model_max_length", "Infinity"),
    "config: eos_token a number": _settings(eos_token=5),
    "config: eos_token a list": _settings(eos_token=["</s>"]),
    "config: eos_token a map of nothing": _settings(eos_token={"a": 1}),
    "config: eos_token unknown": _settings(eos_token="<|nowhere|>"),
    "config: pad_token null": _settings(pad_token=None, eos_token=None),
    "config: padding_side unknown": _settings(padding_side="up"),
    "config: added_tokens_decoder a list": _settings(added_tokens_decoder=["a"]),
    "config: added_tokens_decoder of texts": _settings(added_tokens_decoder={"first": {"content": "a"}}),
    "config: added_tokens_decoder beyond": _settings(
        added_tokens_decoder={"999999": {"content": "H", "special": False}}
    ),
    "config: extra_special_tokens a number": _settings(extra_special_tokens=5),
    "config: extra_special_tokens of a map": _settings(extra_special_tokens={"a": {"b": 1}}),
    "config: additional_special_tokens of numbers": _settings(additional_special_tokens=[1, 2]),
    "config: model_input_names a text": _settings(model_input_names="input_ids"),
    "config: model_input_names of another": _settings(model_input_names=["pixel_values"]),
    "config: backend unknown": _settings(backend="magic"),
    "config: truncation_side unknown": _settings(truncation_side="up"),
    "config: clean_up_tokenization_spaces a text": _settings(clean_up_tokenization_spaces="maybe"),
    "config: split_special_tokens a text": _settings(split_special_tokens="maybe"),
    "config: auto_map a text": _settings(auto_map="tokenization.Tokenizer"),
    "config: tokenizer_file elsewhere": _settings(tokenizer_file="/etc/passwd"),
    "config: name_or_path of a hub": _settings(name_or_path="org/name"),
    "config: a key with the name of a method": _settings(encode="x", decode=5),
    "special tokens: a list": edits.content("special_tokens_map.json", "[1]"),
    "special tokens: cut short": edits.content("special_tokens_map.json", '{"eos'),
    "special tokens: numbers": edits.content("special_tokens_map.json", '{"eos_token": 7}'),
    "added tokens: a list": edits.content("added_tokens.json", "[1]"),
    "added tokens: texts": edits.content("added_tokens.json", '{"a": "b"}'),
    "vocab.json without merges": edits.both(edits.gone(_FILE), edits.content("vocab.json", '{"a": 1}')),
    "tokenizer.model of nothing": edits.both(edits.gone(_FILE), edits.content("tokenizer.model", b"\x0a\xff\xff")),
    "tekken.json of nothing": edits.both(edits.gone(_FILE), edits.content("tekken.json", "{}")),
}

CASES = [
    *(Case(name, damaged("model", damage), damages="tokenizer") for name, damage in _REFUSED.items()),
    *(Case(name, damaged("model", damage), expect="any", damages="tokenizer") for name, damage in _EITHER.items()),
]
