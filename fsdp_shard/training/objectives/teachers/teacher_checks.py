"""Checks before any rank starts that a teacher suits the model of a run, and that a resumed run has the same one."""

from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from fsdp_shard import checkpoint, models
from fsdp_shard.errors import CheckpointError, ConfigError, InputError
from fsdp_shard.training.config import FinetuneSettings
from fsdp_shard.training.objectives.distill import DistillConfig


def check_teacher(config: FinetuneSettings, source: checkpoint.Location) -> None:
    """Check that the teacher of a run can be loaded, and has the required vocabulary and positions.

    Args:
        config: The settings of `finetune`, with `data.sequence_length` settled.
        source: The model that is trained.

    Raises:
        InputError: The teacher cannot be used; the message names the setting.
    """
    distill = config.objective
    if not isinstance(distill, DistillConfig):
        return
    teacher, trust = distill.source, config.model.trust_remote_code
    named = f"objective.teacher={distill.teacher}"
    student, length = models.load_config(source.config_directory, trust), config.data.window_length
    check_teacher_config(distill, teacher, config.model, student, length, is_packed=config.data.packing)
    try:
        checkpoint.check_loadable(teacher.model_index)
        ids = models.load_tokenizer(teacher.tokenizer_directory, trust, can_be_named=False).get_vocab()
    except InputError as error:
        raise type(error)(f"{named}: {error}") from error
    for token, number in models.load_tokenizer(source.tokenizer_directory, trust).get_vocab().items():
        if (other := ids.get(token)) != number:
            has = f"does not have the token {token!r}" if other is None else f"has the token {token!r} as {other}"
            raise ConfigError(
                f"{named} {has}, which is {number} in the tokenizer of {config.model.path}: a student learns from the "
                f"probabilities of the same tokens. Choose a teacher of the same family."
            )


def check_teacher_config(
    distill: DistillConfig,
    teacher: checkpoint.Location,
    model: models.ModelConfig,
    student: PretrainedConfig,
    sequence_length: int,
    *,
    is_packed: bool,
) -> None:
    """Check what the config.json of a teacher shows: whether it suits the task, the samples and the student.

    Args:
        distill: The settings of the objective.
        teacher: The location of the teacher.
        model: The settings of the student.
        student: Its config.
        sequence_length: Number of tokens of a sample.
        is_packed: Whether samples hold several documents.

    Raises:
        InputError: The teacher cannot be used; the message names the setting.
    """
    named = f"objective.teacher={distill.teacher}"
    try:
        own = models.load_config(teacher.config_directory, model.trust_remote_code)
        models.check_causal(own)
        models.check_left_to_right(own)
        if is_packed:
            models.check_packing(own)
        advice = "set at most that, or choose another teacher"
        context_length = models.context_length_of(own, model.trust_remote_code)
        context_length.check(f"data.sequence_length={sequence_length}", sequence_length, advice)
    except InputError as error:
        raise type(error)(f"{named}: {error}") from error
    size, other = (each.get_text_config().vocab_size for each in (own, student))
    if size != other:
        raise ConfigError(
            f"{named} has a vocabulary of {size} tokens, and {model.path} one of {other}: a student learns from the "
            f"probabilities of the same tokens. Choose a teacher of the same family."
        )
    if distill.top_k is not None and distill.top_k > size:
        raise ConfigError(
            f"objective.top_k={distill.top_k} is more than the {size} tokens of the vocabulary; set null for all."
        )


def teacher_record(config: FinetuneSettings) -> dict[str, bytes]:
    """Return each step's record of the teacher, file name -> content; empty without a teacher.

    Args:
        config: The settings of `finetune`.
    """
    if not isinstance(config.objective, DistillConfig):
        return {}
    source = config.objective.source
    path = source.path if source.step is None else str(source.weights)
    with replace(source).model_index as index:  # as it is stored; loading a teacher may change its index
        values = checkpoint.computation(source.expected_config_directory)
        return {checkpoint.TEACHER: checkpoint.BaseModel(path, checkpoint.fingerprint(index), config=values).to_json()}


def check_same_teacher(config: FinetuneSettings, step_directory: Path | None) -> None:
    """Raise CheckpointError if a step was trained with another teacher; reads the first elements of its tensors.

    Args:
        config: The settings of the run.
        step_directory: The step to resume from, if any.
    """
    if not isinstance(config.objective, DistillConfig) or step_directory is None:
        return
    source, recorded = config.objective.source, checkpoint.read_base_model(step_directory, [checkpoint.TEACHER])
    if recorded is None:  # saved by an earlier version
        return
    with replace(source).model_index as index:
        if not checkpoint.is_base_model(index, recorded, source.expected_config_directory):
            raise CheckpointError(
                f"{step_directory} was trained with the teacher {recorded.path}, but objective.teacher="
                f"{config.objective.teacher} holds other weights (names, dtypes, shapes or values differ). Give the "
                f"teacher that it was trained with, or start a new run in another run_dir."
            )
    if changes := checkpoint.config_changes(recorded, source.expected_config_directory):
        raise CheckpointError(
            f"{step_directory} was trained with the teacher {recorded.path}, but config.json of objective.teacher="
            f"{config.objective.teacher} differs from its config.json: {', '.join(changes)}. Restore these values, or "
            f"start a new run in another run_dir."
        )
