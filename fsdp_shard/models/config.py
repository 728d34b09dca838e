"""The `model.*` settings: the model, and the form of its weights during training."""

from dataclasses import dataclass

from fsdp_shard.errors import ConfigError
from fsdp_shard.utils import REQUIRED, setting

CAUSAL, SEQ2SEQ, MASKED_LM, SEQUENCE_CLASSIFICATION = "causal_lm", "seq2seq", "masked_lm", "sequence_classification"

# The warning that a run prints if `trust_remote_code` is on.
REMOTE_CODE = (
    "Python files that come with the model run on every rank with your permissions: they can read and change your "
    "files and secrets and use the network. Review them first, or turn this off."
)


@dataclass
class ModelConfig:
    """Which model to load, and the dtype, task and kernels to use with it."""

    path: str = setting(
        REQUIRED, "Model directory, GGUF file, checkpoint or run directory, or a hub id such as org/name."
    )
    gguf_file: str | None = setting(None, "Name of the GGUF file in model.path, if that is a directory or a hub id.")
    dtype: str = setting(
        "float32",
        "Dtype of the weights that the optimizer updates; shard.param_dtype is the dtype of the computation.",
        choices=("float32", "bfloat16", "float16"),
    )
    task: str = setting(
        CAUSAL,
        "Training task: next-token prediction, sequence to sequence, masked-token prediction, or classification.",
        choices=(CAUSAL, SEQ2SEQ, MASKED_LM, SEQUENCE_CLASSIFICATION),
    )
    labels: list[str] = setting(
        [],
        "task=sequence_classification: class names of a new head, initialized from the seed, such as [bad, good], or "
        "[reward] for objective=reward. Empty: the model's own head.",
    )
    attention: str = setting(
        "auto",
        "Attention implementation, as named by transformers. auto: sdpa, or eager if the model has no other; "
        "flash_attention_2 needs a package and a GPU, so it is used only on request.",
        choices=("auto", "sdpa", "eager", "flash_attention_2"),
    )
    chunked_loss: bool | str = setting(
        "auto",
        "Compute the output head and the loss in chunks of tokens, so that the full logits are never in memory. "
        "auto: for vocabularies of 65,536 tokens or more, if the model supports it.",
        choices=("auto", True, False),
    )
    kernels: str = setting(
        "none",
        "Fused kernels for norms, rotary embeddings and gated MLPs. liger: Liger Kernel, on GPUs (needs the extra "
        "`liger`); model.chunked_loss still applies to the loss.",
        choices=("none", "liger"),
    )
    trust_remote_code: bool = setting(
        False, "Run Python code that comes with the model. Use only with sources you trust.", warning=REMOTE_CODE
    )

    def check(self, prefix: str) -> None:
        """Raise ConfigError for labels with another task, or duplicate labels."""
        if self.labels and self.task != SEQUENCE_CLASSIFICATION:
            raise ConfigError(
                f"{prefix}labels={list(self.labels)} is for {prefix}task={SEQUENCE_CLASSIFICATION}, not {self.task}; "
                f"remove it."
            )
        if len({*self.labels}) < len(self.labels):
            raise ConfigError(f"{prefix}labels={list(self.labels)} has the same name twice; give each class its own.")
