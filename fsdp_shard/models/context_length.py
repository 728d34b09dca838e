"""The context length of a model, and the one rule that checks lengths of samples, prompts and answers against it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.errors import ConfigError
from fsdp_shard.models.file_errors import config_file, model_errors
from fsdp_shard.models.loading import build_on_meta, load_config

_DEFAULT_LENGTH = 2048
_TABLES = frozenset({"position_embeddings", "position_embedding", "embed_positions", "wpe"})


class LengthSettings(Protocol):
    """The settings `data.*` that define how long samples are; None until the context length is known."""

    sequence_length: int | None


@dataclass(frozen=True)
class ContextLength:
    """The number of positions that a model supports.

    Attributes:
        length: The context length in tokens, including rope scaling; None without a limit, as for relative positions.
        is_table: Whether positions are rows of a table, learned or not, so that none exist beyond the last row.
        frequency_limit: The length up to which rotary frequencies do not change, as in `frequency_limit`.
    """

    length: int | None
    is_table: bool = False
    frequency_limit: int | None = None

    def check(self, what: str, length: int, advice: str | None = None) -> str | None:
        """Check a requested length.

        Args:
            what: The name of whatever has this length, for messages.
            length: Number of tokens.
            advice: What to do if the model has no such positions.

        Returns:
            A warning if the model computes such positions, as with rotary ones, but was never trained on them.

        Raises:
            ConfigError: The positions do not exist in the model.
        """
        if self.length is None or length <= self.length:
            return None
        exceeded = f"{what} exceeds the model's context of {self.length} tokens"
        if self.is_table:  # a GPU would fail with an error that does not name the cause
            raise ConfigError(f"{exceeded}, and it has no positions beyond; {advice or f'set at most {self.length}'}.")
        return f"{exceeded}: positions beyond it were never trained"

    def describe(self, sequence_length: int, name: str = "data.sequence_length") -> str:
        """Describe the length of samples and the context length in one line; raises ConfigError as `check` does."""
        known = "a context without limit" if self.length is None else f"a context of {self.length} tokens"
        warning = self.check(f"{name}={sequence_length}", sequence_length)
        if self.frequency_limit is not None and sequence_length > self.frequency_limit:
            warning = (
                f"{warning or f'{name}={sequence_length} of {known}'}; in a batch with a sequence of more than "
                f"{self.frequency_limit} tokens, shorter ones get other rotary frequencies than alone"
            )
        return f"{name}={sequence_length} of {known}" if warning is None else f"warning: {warning}"


def settle_length(data: LengthSettings, context_length: ContextLength) -> int:
    """Set `data.sequence_length`, if it is null, to the smaller of the context length and 2,048.

    Args:
        data: The settings of the data; all later code sees a number.
        context_length: The context length of the model.

    Returns:
        The length.

    Raises:
        ConfigError: The given length exceeds the positions of the model.
    """
    if data.sequence_length is None:
        data.sequence_length = min(context_length.length or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    context_length.check(f"data.sequence_length={data.sequence_length}", data.sequence_length)
    return data.sequence_length


def context_length_of(config: PretrainedConfig, trust_remote_code: bool = False) -> ContextLength:
    """Return the context length of a model.

    Args:
        config: The model's config; unless it has rotary positions or no limit, the model is built on the meta device.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ModelError: transformers cannot build the model.
    """
    with model_errors(f"The context of the model is not known from {config_file(config)}"):
        text = config.get_text_config()
        stated = getattr(text, "max_position_embeddings", None)
        if stated is None or stated < 1:  # XLNet has -1
            return ContextLength(None)
        if rope := getattr(text, "rope_parameters", None):
            return ContextLength(_scaled_length(stated, rope), frequency_limit=frequency_limit(config))
    rows = _table_rows(build_on_meta(config, trust_remote_code=trust_remote_code), stated)
    return ContextLength(stated if rows is None else rows, is_table=rows is not None)


def load_context_length(directory: Path, trust_remote_code: bool) -> ContextLength:
    """Return the context length of the model whose config.json is in `directory`, as `context_length_of` does."""
    return context_length_of(load_config(directory, trust_remote_code), trust_remote_code)


def frequency_limit(config: PretrainedConfig) -> int | None:
    """Return the length up to which the rotary frequencies of a model do not depend on its longest sequence.

    With `rope_type` dynamic or longrope, transformers chooses the frequencies of a whole batch by its last position.

    Returns:
        Number of tokens; None if the frequencies never change.
    """
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    found = []
    for kind in (rope, *rope.values()):  # some models have one per layer type
        name = kind.get("rope_type") if isinstance(kind, dict) else None
        if name == "dynamic":
            found.append(stated)
        elif name == "longrope":
            found.append(kind.get("original_max_position_embeddings") or stated)
    return min((limit for limit in found if isinstance(limit, int)), default=None)


def _scaled_length(stated: int, rope: dict[str, object]) -> int:
    """Return the length with rope scaling: most configs state it, but YaRN recipes leave the trained length."""
    found = [stated]
    for kind in (rope, *rope.values()):  # some models have one per layer type
        if isinstance(kind, dict):
            own = stated if kind.get("rope_type") == "dynamic" else 0  # dynamic scaling stretches the stated length
            found.append(int((kind.get("factor") or 1) * (kind.get("original_max_position_embeddings") or own)))
    return max(found)


def _table_rows(model: PreTrainedModel, stated: int) -> int | None:
    """Return the number of positions in the tables of a model; None without such tables."""
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _TABLES and isinstance(module, nn.Embedding):
            # RoBERTa counts from its padding token; OPT and BART use an offset.
            padding = module.padding_idx
            offset = int(getattr(module, "offset", 0)) if padding is None else padding + 1
            if stated in (module.num_embeddings, module.num_embeddings - offset):  # other tables are for images
                found.append(module.num_embeddings - offset)
    buffers = (buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in _TABLES)
    found += [stated for buffer in buffers if buffer.shape[0] == stated]  # GPT-J computes its table once
    return min(found, default=None)
