"""Checks whether a config.json and the shapes of a checkpoint can belong to one model. Pure; imports no torch.

The rules use common names of transformers' models, and apply only if the config has the key and the checkpoint has the
tensor. Unknown architectures are skipped: a sound model must never be reported. So this finds a config of another size
of the same architecture, missing layers, a missing head, and a resized embedding; it proves nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsdp_shard.utils import format_count

_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HEAD_DIM = ("head_dim", "d_kv")
_INNER = ("intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim")

_TEXT = "text_config"
_EMBEDDINGS = r"embed_tokens|wte|word_embeddings|tok_embeddings|shared|embed_in"
_ANYWHERE = r"(?:^|\.)"
_EMBEDDING = re.compile(rf"{_ANYWHERE}(?:{_EMBEDDINGS})\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.weight$")
# Parts of models other than the text model: their sizes differ, and their configs may leave out defaults.
_OTHER_PARTS = re.compile(r"vision|visual|audio|speech|image|projector|qformer|resampler|lora_|adapter|expert|mtp")


# Keys of attention that is not just heads of one width: latent, linear, gated, several kinds in one model.
_NOT_PLAIN = re.compile(
    r"lora_rank|qk_|v_head|(?<!key_)value_head|global_|linear_|_gate\b|conv|swa_|ssm|mamba|hybrid|layer_group"
)


# The layers of the model itself under any wrappers; other stacks (an adapter, a geometry encoder) have other sizes.
_STACK = (
    r"^(?P<stack>(?:model\.|transformer\.|language_model\.|text_model\.|gpt_neox\.|bert\.|roberta\.|encoder\.|decoder\.)*"
    r"(?:layers?|h|block))\.(?P<number>\d+)\."
)
_LAYER = re.compile(_STACK)
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


_EMBEDDING_SIZE = re.compile(r"embed\w*_(?:size|dim|rank)|word_embed_|^d_embed|^emb_dim")


class _Sizes:
    """Looks up numbers in a config under alternative keys, in its text part if it has one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        every = [config, *(value for value in config.values() if isinstance(value, Mapping))]
        self.is_plain_attention = not any(_NOT_PLAIN.search(key) for part in every for key in part)
        self.has_embedding_size = any(_EMBEDDING_SIZE.search(key) for part in every for key in part)
        tied = {part["tie_word_embeddings"] for part in every if "tie_word_embeddings" in part}
        self.ties, self.unties = True in tied, tied == {False}
        self.predicts_further = any(re.search(r"nextn|mtp", key) for part in every for key in part)
        self._part = config[_TEXT] if isinstance(config.get(_TEXT), Mapping) else config

    def get(self, *keys: str) -> tuple[str, int] | None:
        """(key, value) of the first of `keys` with a count; None if there is none, or two disagree."""
        values = {key: self._part.get(key) for key in keys}
        found = [(key, value) for key, value in values.items() if type(value) is int and value > 0]
        return found[0] if len({value for _, value in found}) == 1 else None


Expected = Callable[[_Sizes], tuple[str, int] | None]
"""From the sizes of a config, (the keys with their values, the size that they imply)."""


def config_problems(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The contradictions between a config.json and the shapes of tensors.

    Args:
        config: The parsed config.json.
        shapes: The shape of each tensor and alias.

    Returns:
        One sentence per contradiction.
    """
    if "auto_map" in config or _is_composed(config) or _OTHER_PARTS.search(str(config.get("model_type"))):
        return []  # custom code, or several models in one: their names are not known
    sizes = _Sizes(config)
    names = [name for name in shapes if not _OTHER_PARTS.search(name)]
    problems = list(_layer_problems(sizes, names))
    if "quantization_config" in config or "compression_config" in config:
        return problems  # packed weights have other shapes
    kept = {name: shapes[name] for name in names}
    problems += [*_vocabulary_problems(sizes, kept), *_head_problems(config, sizes, shapes)]
    for start, module, axis, expected in _RULES:
        weight = re.compile(rf"{start}(?:{module})\.weight$")
        matching = {name: shape for name, shape in kept.items() if weight.search(name) and len(shape) > axis}
        problems += _axis_problems(expected(sizes), axis, matching)
    return problems


def _is_composed(config: Mapping[str, Any]) -> bool:
    nested = [key for key, value in config.items() if isinstance(value, Mapping) and "model_type" in value]
    return bool(nested) and _TEXT not in config


def _axis_problems(expected: tuple[str, int] | None, axis: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    actual = {shape[axis] for shape in shapes.values()}
    # If layers differ among themselves, the model is built from more than this one number.
    if expected is not None and len(actual) == 1 and actual != {expected[1]}:
        name, shape = next(iter(shapes.items()))
        more = f", and so for {len(shapes) - 1:,} more" if len(shapes) > 1 else ""
        yield f"{expected[0]} requires {expected[1]} in dimension {axis} of {name}, which is {list(shape)}{more}."


def _layer_problems(sizes: _Sizes, names: list[str]) -> Iterator[str]:
    stacks: dict[str, set[int]] = {}
    for name in names:
        if match := _LAYER.match(name):
            stacks.setdefault(match["stack"], set()).add(int(match["number"]))
    # Other stacks, such as convolutions, may number their layers with gaps.
    attends = any(_LAYER.match(name) and _ATTENTION.search(name) for name in names)
    expected = sizes.get(*_LAYERS)
    if expected is None or len(stacks) != 1 or not attends:
        return
    ((stack, numbers),) = stacks.items()
    key, count = expected
    missing = sorted(set(range(count)) - numbers)
    has = f"{key}={count}, but {stack} has {format_count(len(numbers), 'layer')}"
    if missing:
        yield f"{has}, and {stack}.{missing[0]} is not among them."
    elif max(numbers) >= count and not sizes.predicts_further:
        yield f"{has}, up to {stack}.{max(numbers)}."


def _head_problems(config: Mapping[str, Any], sizes: _Sizes, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """If the head of a language model is not tied to its embedding, two tensors have as many rows."""
    named = config.get("architectures")
    of = named[0] if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else ""
    embeddings = [name for name in shapes if _EMBEDDING.search(name)]
    if not of.endswith("ForCausalLM") or not sizes.unties or len(embeddings) != 1:
        return
    rows = shapes[embeddings[0]][0] if len(shapes[embeddings[0]]) == 2 else 0
    known = {rows, *(found[1:] if (found := sizes.get("vocab_size")) else ())}
    if not any(known & {*shape} for name, shape in shapes.items() if name != embeddings[0]):
        yield (
            f"tie_word_embeddings=false gives a {of} a head besides {embeddings[0]}, which is "
            f"{list(shapes[embeddings[0]])}, but no other tensor has as many rows."
        )


def _size(*keys: str) -> Expected:
    def expected(sizes: _Sizes) -> tuple[str, int] | None:
        found = sizes.get(*keys)
        return found and (f"{found[0]}={found[1]}", found[1])

    return expected


def _embedding(sizes: _Sizes) -> tuple[str, int] | None:
    """The width of embeddings; not known if it may differ from that of the layers."""
    return None if sizes.has_embedding_size else _size(*_HIDDEN)(sizes)


def _projection(heads: tuple[str, ...]) -> Expected:
    """The number of heads times their width, if the config gives or implies both."""

    def expected(sizes: _Sizes) -> tuple[str, int] | None:
        count, every, width, hidden = (sizes.get(*keys) for keys in (heads, _HEADS, _HEAD_DIM, _HIDDEN))
        if count is None or every is None or (width is None and hidden is None) or not sizes.is_plain_attention:
            return None
        if width is not None:
            return f"{count[0]}={count[1]} with {width[0]}={width[1]}", count[1] * width[1]
        assert hidden is not None
        if hidden[1] % every[1]:
            return None
        return f"{count[0]}={count[1]} with {hidden[0]}={hidden[1]}", count[1] * (hidden[1] // every[1])

    return expected


# Dimension `axis` of the weights of these modules has the size that a config implies: (start, module, axis, size).
_RULES: tuple[tuple[str, str, int, Expected], ...] = (
    (_ANYWHERE, _EMBEDDINGS, 1, _embedding),
    (_STACK, r"self_attn\.q_proj", 0, _projection(_HEADS)),
    (_STACK, r"self_attn\.o_proj", 1, _projection(_HEADS)),
    (_STACK, r"self_attn\.[kv]_proj", 0, _projection(("num_key_value_heads",))),
    (_STACK, r"self_attn\.[qkv]_proj", 1, _size(*_HIDDEN)),
    (_STACK, r"self_attn\.o_proj", 0, _size(*_HIDDEN)),
    (_STACK, r"mlp\.(?:gate|up)_proj", 0, _size(*_INNER)),
    (_STACK, r"mlp\.down_proj", 1, _size(*_INNER)),
    (_STACK, r"mlp\.(?:gate|up)_proj", 1, _size(*_HIDDEN)),
    (_STACK, r"mlp\.down_proj", 0, _size(*_HIDDEN)),
    (_STACK, r"input_layernorm|post_attention_layernorm", 0, _size(*_HIDDEN)),
    # T5
    (_STACK, r"layer\.0\.SelfAttention\.[qkv]", 0, _projection(_HEADS)),
    (_STACK, r"layer\.\d\.DenseReluDense\.wi(?:_[01])?", 0, _size("d_ff")),
    # GPT-2
    (_STACK, r"ln_[12]", 0, _size("n_embd")),
    # BERT
    (_STACK, r"attention\.self\.(?:query|key|value)", 1, _size("hidden_size")),
    (_STACK, r"intermediate\.dense", 0, _size("intermediate_size")),
)


def _vocabulary_problems(sizes: _Sizes, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Rows of embedding and head. The embedding of some models has more rows, for tokens that are never predicted."""
    found = sizes.get("vocab_size")
    heads = {name: shape[0] for name, shape in shapes.items() if _HEAD.search(name) and shape}
    embeddings = {name: shape[0] for name, shape in shapes.items() if _EMBEDDING.search(name) and shape}
    if found is None or len({*heads.values()}) > 1 or len({*embeddings.values()}) > 1:
        return
    key, size = found
    for name, rows in [*heads.items(), *embeddings.items()]:
        if rows < size or (rows > size and (name in heads or rows in heads.values() or sizes.ties)):
            yield f"{key}={size}, but {name} has {rows} rows."
            return
