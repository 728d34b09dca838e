"""What `coverage.py` tries with one model, step by step: shard it as it is, and train it small."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_shard.checkpoint import CheckpointConfig, locate
from fsdp_shard.data import (
    Dataset,
    Examples,
    LabeledRows,
    MaskedWindows,
    Seq2SeqRows,
    ShuffledDataset,
    SpecialTokens,
    WindowDataset,
)
from fsdp_shard.distributed import DistributedContext
from fsdp_shard.inference import load_dispatched
from fsdp_shard.models import ModelConfig, build_on_meta, no_split_blocks
from fsdp_shard.sharding import Fsdp2Config, plan_units
from fsdp_shard.training import (
    FinetuneSaver,
    RunContent,
    RunLock,
    TrainConfig,
    TrainerState,
    TrainingRun,
    load_sharded,
    train,
)
from tests.support.ranks import on_ranks

STEPS, BATCH, LR, SEED = 2, 4, 0.05, 4
MOST_PARAMETERS = 40_000_000
TOLERANCE = 1e-4  # relative, of losses; and of weights, to the largest of each
TASKS = {
    "causal": "causal_lm",
    "seq2seq": "seq2seq",
    "masked": "masked_lm",
    "classifier": "sequence_classification",
}

_LAYERS = re.compile(r"(num_|n_)?(\w+_)?(layers?|blocks|depth)$")
_WIDTHS = {"hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "dim": 64, "embedding_size": 64}
_WIDTHS |= {"intermediate_size": 96, "moe_intermediate_size": 32, "d_ff": 96, "ffn_dim": 96, "n_inner": 96}
_WIDTHS |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "feed_forward_size": 96, "word_embed_proj_dim": 64}
_WIDTHS |= {"shared_expert_intermediate_size": 32, "hidden_dim": 96, "attention_head_size": 16, "d_kv": 16}
_WIDTHS |= {"num_attention_heads": 4, "num_heads": 4, "n_head": 4, "encoder_attention_heads": 4, "head_dim": 16}
_WIDTHS |= {"decoder_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 16, "num_local_experts": 16}
_WIDTHS |= {
    "n_routed_experts": 16,
    "rotary_dim": 8,
    "vocab_size": 257,
    "max_position_embeddings": 128,
    "n_positions": 128,
}
# For a second try, where None is replaced too: what has to be in proportion for some.
_FILLED = _WIDTHS | {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_FILLED |= {"d_head": 16, "mamba_n_heads": 8, "mamba_d_head": 16}
_COUNTS = re.compile(r"^(num|n)_|heads?$|vocab|position|expert")  # and what has to stay in proportion to them
_RANDOM = re.compile(r"dropout|drop_rate|drop_path|layerdrop|jitter|pdrop", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A model class of transformers: of which kind, listed for which type of config, and its name."""

    kind: str
    type: str
    cls: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.type}/{self.cls}"

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.cls)

    def config(self, num_layers: int | None = None, widths: str = "real") -> PretrainedConfig:
        """The default config of the class, with few layers if asked.

        `widths` are real, small, filled (small, with a number instead of None), or divided by 8.
        """
        kind = self.model_class.config_class  # a text model may be listed for the config around its own
        config: PretrainedConfig = kind()
        if num_layers is not None or widths != "real":
            config = kind.from_dict(_small(config.to_dict(), num_layers or 1000, widths))
        config.architectures = [self.cls]
        if self.kind == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        return config


def _small(values: Mapping[str, Any], num_layers: int, widths: str) -> dict[str, Any]:
    """A config, or a part of it, with few layers; lists with an entry for each layer are cut as well."""
    counts = {value for name, value in values.items() if _LAYERS.match(str(name)) and type(value) is int and value > 1}

    def small(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _small(value, num_layers, widths)
        if isinstance(value, list) and len(value) in counts:
            return value[:num_layers]
        if type(value) is int and _LAYERS.match(name):
            return 0 if "shared" in name else min(value, num_layers)  # layers that reuse what others have computed
        if widths == "real":
            return value
        if isinstance(value, float) and _RANDOM.search(name):
            return 0.0
        if type(value) is int and name.endswith(("token_id", "token_index")):
            return min(value, _WIDTHS["vocab_size"] - 1)
        if widths == "filled" and name in _FILLED and (value is None or type(value) is int):
            return min(value or _FILLED[name], _FILLED[name])
        if type(value) is not int:
            return value
        if "vocab" in name:
            return min(value, _WIDTHS["vocab_size"])
        if widths == "divided" and value >= 32 and not _COUNTS.search(name):
            return value // 8
        return min(value, _WIDTHS[name]) if name in _WIDTHS and (widths == "small" or "head" not in name) else value

    # Entries by the index of a layer are cut as lists are.
    kept = {name: value for name, value in values.items() if not (str(name).isdigit() and int(name) >= num_layers)}
    return {name: small(str(name), value) for name, value in kept.items()}


def shard_as_it_is(case: Case) -> Iterator[str]:
    """Build the model with its real widths on meta, resolve its blocks, and shard it on two ranks, still on meta."""
    model = _first(lambda layers: build_on_meta(case.config(layers), "float32"), (4, None))
    yield "built"
    no_split_blocks(model)
    yield "resolved"
    plan_units(model, Fsdp2Config())  # the ranks inherit what it found
    on_ranks(2, _shard, model)
    yield "sharded"


def _shard(context: DistributedContext, model: nn.Module) -> None:
    Fsdp2Config().shard(model, replace(context, device=torch.device("meta")))


def _first(make: Any, attempts: Sequence[Any]) -> Any:
    """What `make` makes of the first of `attempts` that it does not fail with, or the error of the very first."""
    failures = []
    for attempt in attempts:
        try:
            return make(attempt)
        except Exception as error:
            failures.append(error)
    raise failures[0]


def train_small(case: Case) -> Iterator[str]:
    """Train the model, small and random, on two ranks and in one process; save, reload and dispatch it."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        attempts: list[tuple[int | None, str]] = [(2, "small"), (2, "divided"), (4, "small"), (4, "divided")]
        attempts += [(None, "divided"), (2, "real"), (2, "filled"), (4, "filled")]
        model, data, losses, statistics = _first(lambda attempt: _train_plain(case, root, *attempt), attempts)
        yield "trained by one process"
        ranks = on_ranks(2, _train_sharded, case, root, data, timeout_seconds=120)
        yield "trained"
        _expect(max(abs(a - b) / abs(b) for a, b in zip(ranks[0], losses, strict=True)), "losses")
        saved = root / "run/checkpoints/step-00000002"
        found = case.model_class.from_pretrained(saved).state_dict()
        plain = {key: value for key, value in model.state_dict().items() if key not in statistics}
        _expect(max(_distance(found[key], plain[key]) for key in plain if plain[key].is_floating_point()), "weights")
        yield "equal"
        dispatched = load_dispatched(saved, device_map="cpu")
        inputs = {key: torch.from_numpy(value) for key, value in data.batch(range(2)).inputs.items()}
        with torch.no_grad():
            got, want = (each(**inputs, use_cache=False).logits for each in (dispatched, model.eval()))
        _expect(_distance(got, want), "logits after dispatch")
        yield "dispatched"


def _expect(error: float, what: str) -> None:
    if not error <= TOLERANCE:
        raise ValueError(f"{what} differ by {error:.1e}")


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-3))


def _train_plain(
    case: Case, root: Path, num_layers: int | None, widths: str
) -> tuple[PreTrainedModel, Dataset, list[float], set[str]]:
    """A random model, written to `root/model` and then trained; its data, the loss of each step, and the names of its
    buffers that training changes.
    """
    torch.manual_seed(0)
    config = case.config(num_layers, widths)
    text = config.get_text_config()
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # as published ones have it
    if case.kind == "classifier":
        config.num_labels = 3
        for part in {id(part): part for part in (config, text)}.values():
            part.pad_token_id = 0
    if (num_params := sum(param.numel() for param in build_on_meta(config, "float32").parameters())) > MOST_PARAMETERS:
        raise ValueError(f"it cannot be made small: {num_params / 1e6:.0f} M parameters")
    model = case.model_class(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)  # so that norms and biases are not all alike
    model.save_pretrained(root / "model")
    # Training starts from what is loaded: positions may be computed, and the row of the padding token zeroed.
    model = case.model_class.from_pretrained(root / "model", dtype=torch.float32)
    data = ShuffledDataset(_samples(case.kind, config), SEED)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=LR)
    losses, before = [], {name: buffer.clone() for name, buffer in model.named_buffers()}
    for step in range(STEPS):
        batch = data.batch(range(step * BATCH, (step + 1) * BATCH))
        inputs = {key: torch.from_numpy(value) for key, value in batch.inputs.items()}
        logits = model(**inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, -2), torch.from_numpy(batch.labels).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # Statistics of activations, which each rank takes of its own micro-batches.
    statistics = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    return model, data, losses, statistics


def _samples(kind: str, config: PretrainedConfig) -> Any:
    """Random samples of the kind that the model is trained on."""
    text = config.get_text_config()
    vocabulary = min(getattr(text, "vocab_size", 257), 257)
    tokens = np.random.default_rng(1).integers(5, vocabulary - 5, 480)
    if kind == "masked":
        return MaskedWindows(tokens, 16, "random", SpecialTokens(2, (0,), (1,), vocabulary), 0.3, SEED)
    if kind == "causal" or (kind == "seq2seq" and not config.is_encoder_decoder):  # of speech, with a decoder only
        return WindowDataset(tokens, 16, "random")
    ends = np.arange(16, 481, 16)
    if kind == "classifier" and isinstance(end := getattr(text, "eos_token_id", None), int):
        tokens[ends - 1] = end  # by which some classifiers find the end of a text
    examples = Examples(tokens, np.ones(len(tokens)), ends, np.full(30, 6), np.arange(30) % 3, "random")
    if kind == "seq2seq":
        return Seq2SeqRows(examples, np.arange(30), 16, "", 10, getattr(config, "decoder_start_token_id", None) or 0)
    return LabeledRows(examples, np.arange(30), 16, "", (2, 0, 1))


def _train_sharded(context: DistributedContext, case: Case, root: Path, data: Dataset) -> list[float]:
    """The loss of each step, on the ranks; the model is saved in `root/run`."""
    warnings.simplefilter("ignore")
    model = ModelConfig(path=str(root / "model"), task=TASKS[case.kind])
    loaded = load_sharded(model, Fsdp2Config(param_dtype="float32"), locate(model.path), context)
    optimizer = torch.optim.SGD(loaded.model.module.parameters(), lr=LR)
    config = TrainConfig(
        steps=STEPS, global_batch_size=BATCH, micro_batch_size=1, max_grad_norm=None, schedule="constant"
    )
    run = TrainingRun(loaded.model, optimizer, data, config, context, TrainerState(SEED, data.identity))
    losses = [report.loss for report in train(run)]
    files = {path.name: path.read_bytes() for path in (root / "model").glob("*.json")}
    settings = CheckpointConfig(layout="gathered", asynchronous=False)
    content = RunContent(loaded, optimizer, None, files)
    with FinetuneSaver(str(root / "run"), settings, context, content, _Quiet(), RunLock()) as saver:
        saver.save(run.state)
    return losses


class _Quiet:
    """A log of saves that says nothing."""

    def note(self, lines: str) -> None: ...

    def warn(self, lines: str) -> None: ...

    def saved(self, directory: Path) -> None: ...
