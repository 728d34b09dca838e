"""Settings of dispatch and generation, and their consistency rules. Imports no torch, so mistakes show at once."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fsdp_shard.checkpoint import Location, SourceSettings, locate
from fsdp_shard.data import parse_chat_template_kwargs, read_chat_template
from fsdp_shard.errors import ConfigError, InputError
from fsdp_shard.inference.registry import QUANTIZATIONS
from fsdp_shard.models import REMOTE_CODE
from fsdp_shard.utils import (
    REQUIRED,
    Parsed,
    derived,
    free_text,
    nearest,
    parse_size,
    refuse_changed,
    refuse_remote,
    require_package,
    setting,
)

Device = int | str
"""A device for a block: the number of a GPU, `cpu`, or `disk`, from which it is read each time it runs."""

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential", "cpu", "disk")
AUTO, BATCH_MAJOR, LAYER_MAJOR = "auto", "batch_major", "layer_major"
SCHEDULES = (BATCH_MAJOR, LAYER_MAJOR)
_STREAMING = ("prefetch_blocks", "schedule")  # settings of streamed blocks
DTYPES = ("keep", "float32", "bfloat16", "float16")


def parse_device_map(value: Any, setting: str = "device_map") -> str | dict[str, Device]:
    """Parse a strategy name, or a mapping from module names to devices.

    Args:
        value: The value as given; None is `auto`.
        setting: Name of the setting, for errors.

    Returns:
        The strategy, or module FQN -> device, with "" for all modules not named.

    Raises:
        ConfigError: The value is neither.
    """
    if value is None or (isinstance(value, str) and value in STRATEGIES):
        return value or "auto"
    if isinstance(value, dict):
        # transformers' key for all other modules is '', which cannot be typed on the command line.
        return {
            "" if name == "*" else str(name): parse_device(device, f"{setting}.{name}")
            for name, device in value.items()
        }
    raise ConfigError(
        f"{setting}={value} is not one of {', '.join(STRATEGIES)}{nearest(str(value), STRATEGIES)}, nor a mapping such "
        f"as {{model.embed_tokens: cpu, model.layers: disk}}."
    )


def parse_device(value: Any, setting: str) -> Device:
    """Parse `cpu`, `disk`, or a GPU as 1, `1`, `cuda:1` or `cuda`; raises ConfigError otherwise."""
    match = re.fullmatch(r"cpu|disk|cuda|(?:cuda:)?(\d+)", str(value))
    if match is None or isinstance(value, bool):
        raise ConfigError(f"{setting}={value} is not a device; give cpu, disk, or a GPU such as 0 or cuda:0.")
    if match[1] is not None:
        return int(match[1])
    return 0 if match[0] == "cuda" else match[0]


def parse_budgets(value: dict[Any, Any] | None, setting: str = "max_memory") -> dict[Device, int] | None:
    """Parse the bytes of each device.

    Args:
        value: Device -> size, as given; None for no budgets.
        setting: Name of the setting, for errors.

    Returns:
        Device -> bytes, or None.

    Raises:
        ConfigError: A key is not a device, or a value not a size.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{setting}={value} is not a mapping from devices to sizes such as {{0: 20GB, cpu: 64GB}}.")
    budgets: dict[Device, int] = {}
    for name, size in value.items():
        device = parse_device(name, f"a key of {setting}")
        if device == "disk":
            raise ConfigError(f"{setting} has a budget for disk, which needs none: nothing is written there.")
        budgets[device] = parse_size(size, f"{setting}.{name}")
    return budgets


def parse_adapters(value: Any, setting: str = "adapters") -> dict[str, str]:
    """Parse adapter paths by name; ConfigError if a name is not a valid module name, or a path is not a string."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(path, (str, os.PathLike)) for path in value.values()):
        raise ConfigError(f"{setting}={value} is not a mapping from names to adapters, such as {{sql: runs/sql}}.")
    for name in value:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", str(name)):
            raise ConfigError(f"{setting} has the name {name!r}; give a letter, then letters, digits, - and _.")
    return {str(name): os.fspath(path) for name, path in value.items()}


def locate_adapters(paths: Mapping[str, str]) -> dict[str, Location]:
    """Locate `adapters`, by name; raises InputError, naming the setting, for anything that is not an adapter."""
    found = {}
    for name, path in paths.items():
        try:
            found[name] = locate(path)
            if not found[name].is_adapter:
                raise ConfigError(f"{found[name].weights} holds the weights of a model, not an adapter.")
        except InputError as error:
            raise type(error)(f"adapters.{name}={path}: {error}") from error
    return found


@dataclass
class DispatchConfig:
    """The devices on which a model's blocks are stored and run."""

    device_map: Any = setting(
        "auto",
        "auto and balanced: GPUs evenly, then CPU, then disk; balanced_low_0: least on GPU 0; sequential: fill each "
        "device before the next; cpu; disk; or a mapping from module names (* for all others) to a GPU number, cpu or "
        "disk. If no GPU computes, weights are memory-mapped from the checkpoint files: do not modify these files "
        "while the model lives, because truncating one ends the process (SIGBUS). Weights on a GPU, converted to "
        "another dtype, or quantized are copied into memory.",
    )
    # Any, not dict | None: OmegaConf cannot replace an optional dict that is None by a mapping.
    max_memory: Any = setting(
        None,
        "Budgets such as {0: 20GB, cpu: 64GB}. Only these devices and disk are used. With several ranks per machine, "
        "each rank uses the GPU of its number, so include all of them; the CPU size is per rank. Default: the memory "
        "that is free now.",
    )
    dtype: str = setting(
        "keep", "Dtype to load weights in; keep: the stored dtype, of most bytes if there are several.", choices=DTYPES
    )
    prefetch_blocks: int = setting(
        2, "Blocks on disk, or on the CPU of a machine with GPUs, to prefetch while one computes.", minimum=0
    )
    schedule: str = setting(
        AUTO,
        "For `evaluate task=perplexity` with streamed blocks. batch_major: one batch after the other. layer_major: "
        "each block is fetched once, and all batches run through it, or as many as threads and memory allow. auto: "
        "whichever reads and writes less. The figures are the same.",
        choices=(AUTO, *SCHEDULES),
    )

    quantize: str = setting(
        "none",
        "Store the weights of linear layers in 8 or 4 bits (torchao, weight only; needs the extra `quantize`). The "
        "quantized model must fit in memory, because nothing is streamed.",
        choices=("none", *QUANTIZATIONS),
    )
    trust_remote_code: bool = setting(
        False, "Run Python code that comes with the model. Use only with sources you trust.", warning=REMOTE_CODE
    )

    assignment = Parsed("device_map", parse_device_map)
    budgets = Parsed("max_memory", parse_budgets)

    def check(self, prefix: str) -> None:
        """Raise ConfigError if `quantize` lacks its package, or for settings without effect."""
        if self.quantize != "none":
            QUANTIZATIONS[self.quantize].check_installed(f"{prefix}quantize={self.quantize}")
            refuse_changed(self, _STREAMING, prefix, f"has no effect with {prefix}quantize={self.quantize}.")
        named, given, budgets = f"{prefix}device_map={self.device_map}", self.assignment, set(self.budgets or ())
        gpus = sorted(device for device in budgets if isinstance(device, int))
        fixed: dict[str, set[Device]] = {"cpu": {"cpu"}, "disk": {"disk", *gpus[:1]}}
        # A strategy uses as many of the devices as it needs.
        used = {*given.values()} if isinstance(given, dict) else fixed.get(given, {*budgets, "disk"})
        # Data read from disk stays in CPU memory.
        if unused := sorted(budgets - used - ({"cpu"} if "disk" in used else set()), key=str):
            raise ConfigError(f"{prefix}max_memory has {unused[0]}, which {named} does not use; remove it.")
        if budgets and (missing := sorted(used - budgets - {"disk"}, key=str)):
            raise ConfigError(f"{prefix}max_memory lacks {missing[0]}, which {named} uses; add its size.")
        if "disk" not in used and (used == {"cpu"} or "cpu" not in used):
            refuse_changed(self, _STREAMING, prefix, f"has no effect with {named}: no block is streamed.")


@dataclass
class GenerationSettings:
    """How text is generated. Names and meanings follow transformers' GenerationConfig.

    Attributes:
        sampling_settings: Those that only `do_sample=true` uses. As None, they are those of the model's own config.
    """

    sampling_settings: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "top_k")

    max_new_tokens: int = setting(64, "Maximum number of tokens to generate per prompt.", minimum=1)
    do_sample: bool = setting(False, "Sample tokens by their probability; if false, choose the most likely one.")
    temperature: float | None = setting(
        None, "Values below 1 sharpen the distribution, above 1 flatten it. Default: the model's own.", above=0.0
    )
    top_p: float | None = setting(
        None, "Sample from the most likely tokens with this total probability.", above=0.0, maximum=1.0
    )
    top_k: int | None = setting(None, "Sample from this many most likely tokens; 0: from all.", minimum=0)
    num_beams: int = setting(
        1, "Number of beams for beam search; 1: no beam search, even if the model's own config asks for it.", minimum=1
    )
    repetition_penalty: float | None = setting(
        None, "Values above 1 make repeated tokens less likely (Keskar et al. 2019).", above=0.0
    )
    stop_strings: list[str] = setting(
        [],
        "Texts that end an answer, which includes the token that completes one of them. Default: the model's own. For "
        "a line break, use a settings file or bash's $'generation.stop_strings=[\"\\n\"]'.",
    )
    batch_size: int = setting(8, "Prompts per batch; prompts of similar length are batched together.", minimum=1)
    cache: str = setting(
        "dynamic",
        "KV cache: dynamic keeps it on the device that computes it; offloaded keeps it in CPU memory while another "
        "layer computes on a GPU; none recomputes keys and values for each token.",
        choices=("dynamic", "offloaded", "none"),
    )
    output_scores: bool = setting(
        False, "Also write log_probabilities: those of each new token under the model's own distribution."
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError for sampling settings without sampling, scores with beam search, and empty stop strings."""
        if "" in self.stop_strings:
            raise ConfigError(f"{prefix}stop_strings={self.stop_strings} has an empty text; remove it.")
        if self.output_scores and self.num_beams > 1:
            raise ConfigError(
                f"{prefix}output_scores=true cannot be combined with {prefix}num_beams={self.num_beams}, where tokens "
                f"come from several beams; remove one of them."
            )
        why = f"has no effect while {prefix}do_sample=false; add {prefix}do_sample=true, or remove it."
        refuse_changed(self, () if self.do_sample else self.sampling_settings, prefix, why)


@dataclass
class CheckpointSettings(SourceSettings):
    """The checkpoint that `generate` or `evaluate` reads."""

    checkpoint: str = setting(
        REQUIRED, "A run or one of its steps (RUN@best), a checkpoint of any format, a .gguf file, or a hub id."
    )

    @derived("checkpoint", "base", "config", "tokenizer")
    def source(self) -> Location:
        """The located `checkpoint`, located once."""
        return locate(self.checkpoint, base=self.base, config=self.config, tokenizer=self.tokenizer)


@dataclass
class GenerateSettings(CheckpointSettings):
    """The settings of `generate`: the model, the prompts, and the output."""

    prompt: str | None = free_text("Text to continue; - reads it from standard input, without the newline at its end.")
    prompts: str | None = setting(
        None,
        'A file of prompts, instead of prompt: .jsonl with rows {"prompt": ...}, or .txt with one per line; - reads '
        'lines from standard input. With chat=true, rows may be conversations {"messages": [...], "tools": [...]}.',
    )
    output: str | None = setting(
        None,
        "A .jsonl file for the completions; an existing file with the same prompts and settings is resumed. Default: "
        "completions.jsonl in run_dir.",
    )
    chat: bool = setting(
        False,
        "Format each prompt with the model's chat template, as a user message. Without prompts: a conversation on the "
        "terminal.",
    )
    system: str | None = free_text("chat=true: the system message that begins each conversation.")
    chat_template: str | None = setting(
        None,
        "chat=true: a file with a Jinja template, or the name of one of the tokenizer's templates. Default: the "
        "tokenizer's template.",
    )
    # Any, as in DispatchConfig.
    chat_template_kwargs: Any = setting(
        None,
        "chat=true: values of chat template variables, such as {enable_thinking: false}.",
    )
    tensor_parallel: int = setting(
        1,
        "Number of ranks that divide each layer (transformers' tensor-parallel plan). launch.ranks must be a multiple "
        "of it; the groups of ranks divide the prompts.",
        minimum=1,
    )
    # Any, as in DispatchConfig.
    adapters: Any = setting(
        None,
        "LoRA adapters by name, such as {sql: runs/sql, chat: runs/chat@best}, loaded over the model and not merged: a "
        'prompt row chooses one with {"prompt": ..., "adapter": "sql"}.',
    )
    default_adapter: str | None = setting(
        None, "The adapter for prompts that name none; null: the model without an adapter."
    )
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    generation: GenerationSettings = field(default_factory=GenerationSettings)

    adapter_paths = Parsed("adapters", parse_adapters)
    template_text = Parsed("chat_template", read_chat_template)
    template_variables = Parsed("chat_template_kwargs", parse_chat_template_kwargs)

    def check(self, prefix: str) -> None:
        """Raise ConfigError unless there is exactly one source of prompts, or for settings without effect."""
        self._check_adapters(prefix)
        if not self.chat:
            of_chats = ["system", "chat_template", "chat_template_kwargs"]
            refuse_changed(self, of_chats, prefix, f"has no effect without {prefix}chat=true; add it, or remove this.")
        if self.tensor_parallel > 1:
            names = ("device_map", "max_memory", "prefetch_blocks", "quantize")
            why = f"has no effect with {prefix}tensor_parallel={self.tensor_parallel}, where ranks hold parts of layers"
            refuse_changed(self.dispatch, names, f"{prefix}dispatch.", f"{why}; remove one of them.")
        if self.is_conversation:
            why = f"has no effect: {prefix}chat=true without prompts is a conversation on the terminal. Remove it, or"
            refuse_changed(self.generation, ["output_scores"], f"{prefix}generation.", f"{why} give prompts.")
            refuse_changed(self, ["output"], prefix, f"{why} give prompts.")
            return
        if (self.prompt is None) == (self.prompts is None):
            given = "neither is given" if self.prompt is None else "both are given"
            raise ConfigError(
                f"Give exactly one of {prefix}prompt=TEXT and {prefix}prompts=FILE; {given}. For a conversation, give "
                f"{prefix}chat=true and neither."
            )
        if self.prompt is not None and not self.prompt.strip():
            raise ConfigError(f"{prefix}prompt is empty; give some text to continue.")
        if self.output is not None:
            refuse_remote(self.output, f"{prefix}output", "write a local file and copy that.")
        if self.output is not None and Path(self.output).suffix != ".jsonl":
            raise ConfigError(f"{prefix}output={self.output} must end in .jsonl: it gets one JSON row for each prompt.")

    def _check_adapters(self, prefix: str) -> None:
        paths, default = self.adapter_paths, self.default_adapter
        if default is not None and default not in paths:
            known = f"which are {', '.join(paths)}" if paths else "which are not set"
            raise ConfigError(f"{prefix}default_adapter={default} is not one of {prefix}adapters, {known}.")
        if paths and self.tensor_parallel > 1:
            raise ConfigError(
                f"{prefix}adapters cannot be combined with {prefix}tensor_parallel={self.tensor_parallel}, where ranks "
                f"hold parts of layers; remove one of them."
            )
        if paths:
            require_package("peft", "lora", f"{prefix}adapters", f"remove {prefix}adapters")

    @derived("adapters")
    def adapter_sources(self) -> dict[str, Location]:
        """The located `adapters`, by name; errors name the setting."""
        return locate_adapters(self.adapter_paths)

    @property
    def is_conversation(self) -> bool:
        """Whether prompts are typed on the terminal."""
        return self.chat and self.prompt is None and self.prompts is None
