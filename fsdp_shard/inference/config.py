"""Settings of dispatch and generation, and the rules that tie them. Imports no torch, so a typo costs no second."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_shard.errors import ConfigError
from fsdp_shard.inference.quantization import check_quantize
from fsdp_shard.models import REMOTE_CODE
from fsdp_shard.utils import REQUIRED, nearest, parse_size, setting

Device = int | str
"""A place for a block: a GPU's ordinal, `cpu`, or `disk`, which means read again each time the block runs."""

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential", "cpu", "disk")
DTYPES = ("keep", "float32", "bfloat16", "float16")


@dataclass
class DispatchConfig:
    """On which devices the blocks of a model lie while it runs."""

    device_map: Any = field(
        default="auto",
        metadata={
            "help": "auto and balanced: GPUs evenly, then CPU, then disk; balanced_low_0: least on GPU 0; "
            "sequential: each device filled before the next; cpu; disk; or a mapping from module names (* for the "
            "rest) to a GPU's number, cpu or disk."
        },
    )
    # Any, not dict | None: OmegaConf cannot put a mapping in the place of an optional dict that is None.
    max_memory: Any = field(
        default=None,
        metadata={
            "help": "Budgets such as {0: 20GB, cpu: 64GB}. Only the devices in it are used, and disk. "
            "Default: what is free now."
        },
    )
    dtype: str = setting("keep", "The dtype to load weights in; keep: as they are stored.", choices=DTYPES)
    prefetch_blocks: int = setting(
        2, "Blocks on disk, or on the CPU of a machine with GPUs, to fetch while one computes.", minimum=0
    )

    quantize: str = setting(
        "none",
        "Hold the weights of linear layers in 8 or 4 bits (torchao, weight only; needs the extra `quantize`). The "
        "model must then fit: nothing is streamed.",
        choices=("none", "int8", "int4"),
    )
    trust_remote_code: bool = setting(
        False, "Run Python code that comes with the model. Only for sources you trust.", warning=REMOTE_CODE
    )

    def check(self, prefix: str) -> None:
        """Refuse a map or a budget that cannot be read."""
        parse_device_map(self.device_map, f"{prefix}device_map")
        parse_budgets(self.max_memory, f"{prefix}max_memory")
        check_quantize(self.quantize, f"{prefix}quantize")


@dataclass
class GenerationSettings:
    """How text is drawn from the model. Names and meanings are those of transformers' GenerationConfig."""

    max_new_tokens: int = setting(64, "Tokens to generate for each prompt, at most.", minimum=1)
    do_sample: bool = setting(False, "Draw tokens at random by their probability; if false, always take the likeliest.")
    temperature: float | None = setting(
        None, "Below 1 sharpens, above 1 flattens the distribution. Default: the model's own.", above=0.0
    )
    top_p: float | None = setting(
        None, "Draw from the likeliest tokens that together have this probability.", above=0.0, maximum=1.0
    )
    top_k: int | None = setting(None, "Draw from this many of the likeliest tokens; 0: from all.", minimum=0)
    num_beams: int = setting(
        1,
        "Continuations to follow at once in beam search; the likeliest is shown when it is whole. 1: no beam search, "
        "also where the model's own config asks for it.",
        minimum=1,
    )
    repetition_penalty: float | None = setting(
        None, "Above 1 makes tokens that were there before less likely (Keskar et al. 2019).", above=0.0
    )
    batch_size: int = setting(
        8, "Prompts to run through the model at once; those of like length go together.", minimum=1
    )
    cache: str = setting(
        "dynamic",
        "Keys and values of earlier tokens: dynamic keeps them where they are computed; offloaded keeps them in CPU "
        "memory while another layer of a GPU computes; none computes them anew for each token.",
        choices=("dynamic", "offloaded", "none"),
    )
    output_scores: bool = setting(
        False, "Also write log_probabilities: of each new token, under the model's own distribution."
    )

    def check(self, prefix: str) -> None:
        """Refuse sampling settings that nothing would look at, and scores where there are none of what is chosen."""
        if self.output_scores and self.num_beams > 1:
            raise ConfigError(
                f"{prefix}output_scores=true does not go together with {prefix}num_beams={self.num_beams}, where "
                f"tokens come from several continuations; leave one of them out."
            )
        for name in ("temperature", "top_p", "top_k"):
            if getattr(self, name) is not None and not self.do_sample:
                raise ConfigError(
                    f"{prefix}{name}={getattr(self, name)} has no effect while {prefix}do_sample=false; add "
                    f"{prefix}do_sample=true, or leave it out."
                )


@dataclass
class GenerateSettings:
    """What `fsdp-shard generate` is asked: which model, which prompts, where the completions go."""

    checkpoint: str = setting(REQUIRED, "A run, a checkpoint of any format, a .gguf file, or a hub id.")
    prompt: str | None = setting(None, "Text to go on from; - takes it from standard input.")
    prompts: str | None = setting(
        None,
        'A file of prompts: .jsonl with rows {"prompt": ...}, or .txt with one a line; - takes lines from standard '
        "input. Instead of prompt.",
    )
    output: str | None = setting(
        None,
        "A .jsonl file for the completions; one that was begun with the same prompts and settings is gone on with. "
        "Default: completions.jsonl in run_dir.",
    )
    chat: bool = setting(
        False,
        "Give each prompt to the model as a user's message, through its chat template. Without prompts: a conversation "
        "on the terminal.",
    )
    tensor_parallel: int = setting(
        1,
        "Ranks that divide each layer (transformers' tensor-parallel plan). launch.ranks is a multiple of it: so many "
        "groups share the prompts.",
        minimum=1,
    )
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    generation: GenerationSettings = field(default_factory=GenerationSettings)

    def check(self, prefix: str) -> None:
        """Refuse no prompt, or two kinds of it, or one that is empty; and a device map of what is divided."""
        if self.tensor_parallel > 1:
            self._check_divided(prefix)
        if self.is_conversation:
            if self.output is not None:
                raise ConfigError(
                    f"{prefix}output={self.output} would do nothing: {prefix}chat=true without prompts is a "
                    "conversation on the terminal. Leave it out, or give prompts."
                )
            return
        if (self.prompt is None) == (self.prompts is None):
            given = "neither is given" if self.prompt is None else "both are given"
            raise ConfigError(
                f"Exactly one of {prefix}prompt=TEXT and {prefix}prompts=FILE says what to go on from; {given}. For a "
                f"conversation, give {prefix}chat=true and neither."
            )
        if self.prompt is not None and not self.prompt.strip():
            raise ConfigError(f"{prefix}prompt is empty; give some text to go on from.")
        if self.output is not None and Path(self.output).suffix != ".jsonl":
            raise ConfigError(f"{prefix}output={self.output} must end in .jsonl: it gets one JSON row for each prompt.")

    def _check_divided(self, prefix: str) -> None:
        default = DispatchConfig()
        for name in ("device_map", "max_memory", "prefetch_blocks", "quantize"):
            if (value := getattr(self.dispatch, name)) != getattr(default, name):
                raise ConfigError(
                    f"{prefix}dispatch.{name}={value} would do nothing with {prefix}tensor_parallel="
                    f"{self.tensor_parallel}, where each rank holds its part of every layer; leave one of them out."
                )

    @property
    def is_conversation(self) -> bool:
        """Whether what is said comes from the terminal."""
        return self.chat and self.prompt is None and self.prompts is None


def parse_device_map(value: Any, setting: str = "device_map") -> str | dict[str, Device]:
    """A strategy's name, or a mapping from module names to devices; ConfigError when it is neither."""
    if isinstance(value, str) and value in STRATEGIES:
        return value
    if isinstance(value, dict):
        # Others write '' for the rest, which the command line cannot take for a key.
        names = {name: "" if name == "*" else str(name) for name in value}
        return {names[name]: parse_device(device, f"{setting}.{name}") for name, device in value.items()}
    raise ConfigError(
        f"{setting}={value} is not one of {', '.join(STRATEGIES)}{nearest(str(value), STRATEGIES)}, nor a mapping such "
        f"as {{model.embed_tokens: cpu, model.layers: disk}}."
    )


def parse_device(value: Any, setting: str) -> Device:
    """`cpu`, `disk`, or the ordinal in 1, `1`, `cuda:1` or `cuda`; ConfigError otherwise."""
    match = re.fullmatch(r"cpu|disk|cuda|(?:cuda:)?(\d+)", str(value))
    if match is None or isinstance(value, bool):
        raise ConfigError(f"{setting}={value} is no device; expected cpu, disk, or a GPU's number such as 0 or cuda:0.")
    if match[1] is not None:
        return int(match[1])
    return 0 if match[0] == "cuda" else match[0]


def parse_budgets(value: dict[Any, Any] | None, setting: str = "max_memory") -> dict[Device, int] | None:
    """Bytes for each device of `max_memory`; ConfigError for what is no device or no size."""
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{setting}={value} is not a mapping from devices to sizes such as {{0: 20GB, cpu: 64GB}}.")
    budgets: dict[Device, int] = {}
    for name, size in value.items():
        device = parse_device(name, f"a key of {setting}")
        if device == "disk":
            raise ConfigError(f"{setting} has a budget for disk, which needs none: weights are read where they lie.")
        budgets[device] = parse_size(size, f"{setting}.{name}")
    return budgets
