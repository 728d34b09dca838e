"""Pushes a checkpoint to the Hugging Face hub, for `fsdp-shard push` and `convert push_to=`: converted if only
fsdp-shard can load it, and with a model card generated from its run.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from fsdp_shard import checkpoint, evaluation
from fsdp_shard.checkpoint import (
    CARD,
    CARD_MARK,
    ConvertReport,
    ConvertSettings,
    HubRepository,
    HubTarget,
    Location,
    PushReport,
)
from fsdp_shard.config import OPTIONS, FinetuneConfig
from fsdp_shard.errors import ConfigError, RemoteError, one_line
from fsdp_shard.evaluation import CardSubject
from fsdp_shard.utils import (
    chosen_options,
    in_yaml,
    read_bounded,
    say,
    shipped_directory,
    try_lock,
    user_cache,
    walk,
    write_atomically,
)

_MESSAGE, _LONGEST_MESSAGE = "Push {} with fsdp-shard", 200  # of a commit, in characters


def push_to_hub(
    source: str | os.PathLike[str],
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    message: str | None = None,
    adapter_base: str | None = None,
    evaluations: Sequence[str] = (),
) -> PushReport:
    """Push a checkpoint of any format to a repository of the Hugging Face hub, in one commit.

    A Hugging Face directory is pushed unchanged. Any other checkpoint is first converted to one, in a cache directory
    that is kept if the push fails. Pushing again continues where it stopped. The token comes from `hf auth login` or
    HF_TOKEN.

    Args:
        source: A checkpoint, a run (its latest step), or a step of it (RUN@best).
        repo_id: The repository, org/name, created if it does not exist. An existing one keeps its visibility.
        public: Create a public repository, or push to an existing public one.
        revision: The branch, created if it does not exist; None for `main`.
        message: The commit message.
        adapter_base: Push a LoRA adapter itself, for this hub model, instead of the merged model.
        evaluations: Run directories of `evaluate` for these weights, for the model card.

    Returns:
        The result: `url` of the commit, and `written`, the size of each file in bytes, by name.

    Raises:
        ConfigError: The arguments are wrong, there is no token, or the model would be published without `public`.
        CheckpointError, ModelError: The checkpoint is damaged, or has no config.
        RemoteError: The hub rejects a request or fails, or the connection fails.
        SaveError: The converted checkpoint could not be written.

    Example:
        >>> fs.push_to_hub("outputs/run@best", "org/name").url  # doctest: +SKIP
        'https://huggingface.co/org/name/commit/9f8f8da0c3a1b4e8'
    """
    target = HubTarget(repo_id, public, revision)
    target.check("")
    if adapter_base is not None and not checkpoint.is_hub_id(adapter_base):
        raise ConfigError(f"{adapter_base} is not the name of a model on the hub, org/name, which --adapter needs.")
    checkpoint.require_hub()
    location = checkpoint.locate(source)
    adapter = None if adapter_base is None else checkpoint.adapter_to_push(location, adapter_base)
    if not location.is_adapter:
        checkpoint.refuse_adapter_within(location.index)
    model: dict[str, Path | bytes] | None
    model = {**checkpoint.model_to_push(location)} if adapter is None and checkpoint.is_loadable(location) else None
    files = model if adapter is None else adapter
    _refuse_unshown(files or {}, evaluations)
    subject = _subject(target, location, adapter_base, evaluations)
    text = message or _MESSAGE.format(location.weights.name)
    with _advice("The same command resumes where it stopped."):
        repository = checkpoint.open_repository(target)
        say(repository)
        if files is not None:
            return _upload(repository, files, subject, text)
        return _convert_and_upload(repository, location, subject, text)


def push_converted(settings: ConvertSettings, report: ConvertReport) -> dict[str, Any]:
    """Push the output of `convert` to the repository `push_to`, if it is set.

    Args:
        settings: The settings of the conversion.
        report: The result of `run_conversion`; the model card describes the source that it names.

    Returns:
        For result.json: `pushed` with the figures of the push; empty without a push.

    Raises:
        RemoteError: The hub rejects a request or fails, or the connection fails. The target is complete.

    Example:
        >>> fs.push_converted(config, report)["pushed"]["url"]  # doctest: +SKIP
        'https://huggingface.co/org/name/commit/9f8f8da0c3a1b4e8'
    """
    if settings.push_to is None:
        return {}
    source = Location.from_json(report.source)
    pushed = checkpoint.locate(settings.target)
    files: dict[str, Path | bytes] = {**checkpoint.model_to_push(pushed)}
    target = HubTarget(settings.push_to, settings.push_public)
    subject = _subject(target, source, None, ()).of_pushed(pushed)
    message = _MESSAGE.format(source.weights.name)
    again = f"{settings.target} is complete: `fsdp-shard push {settings.target} {settings.push_to}` continues with it."
    try:
        with _advice(again):
            repository = checkpoint.open_repository(target)
            done = _upload(repository, files, subject, message)
    except BaseException:
        # For the next push, which finds no run next to the target.
        write_atomically(pushed.weights / CARD, evaluation.make_card(subject))
        raise
    say(done.describe())
    return {"pushed": dataclasses.asdict(done)}


def _subject(
    target: HubTarget, location: Location, adapter_base: str | None, evaluations: Sequence[str]
) -> CardSubject:
    """Collect the content of the model card, and report anything that cannot be included."""
    subject, problems = evaluation.read_subject(target, location, adapter_base, default_settings, evaluations)
    for problem in problems:
        say(f"not in the model card: {problem}", sys.stderr)
    return subject


def default_settings(chosen: Mapping[str, str]) -> dict[str, str]:
    """The default of each `finetune` setting, by dotted name; for groups, of the options in `chosen`."""
    config: Any = FinetuneConfig()
    for group, options in OPTIONS.items():
        if hasattr(config, group) and chosen.get(group) in options:
            setattr(config, group, options[chosen[group]]())
    shipped = yaml.safe_load((shipped_directory("conf") / "finetune.yaml").read_text(encoding="utf-8"))
    groups = {group: str(option) for group, option in chosen_options(shipped["defaults"]).items()}
    return groups | {name: in_yaml(value) for name, _, value in walk(config)}


def _convert_and_upload(
    repository: HubRepository, location: Location, subject: CardSubject, message: str
) -> PushReport:
    """Push a checkpoint that only fsdp-shard can load: converted to a directory that is kept if the push fails."""
    states = json.dumps([str(location.weights.resolve()), location.file_states()])
    work = user_cache("push") / hashlib.blake2b(states.encode(), digest_size=12).hexdigest()
    work.parent.mkdir(parents=True, exist_ok=True)
    # Pushes of one source to several repositories at once share the directory; the lock file stays.
    with (work.parent / f".{work.name}.lock").open("a") as lock:
        _wait_for_lock(lock, fcntl.LOCK_SH)
        if not work.exists():
            _wait_for_lock(lock, fcntl.LOCK_EX)  # another push may be converting
        if work.exists():
            say(f"continuing with {work}")
        else:
            say(checkpoint.convert_location(location, work).describe(str(work)))
        _wait_for_lock(lock, fcntl.LOCK_SH)
        try:
            pushed = checkpoint.locate(work)
            report = _upload(repository, {**checkpoint.model_to_push(pushed)}, subject.of_pushed(pushed), message)
        except BaseException:
            say(f"{work} is kept for the next push", sys.stderr)
            raise
        if try_lock(lock.fileno(), fcntl.LOCK_EX):  # the last one deletes it
            shutil.rmtree(work, ignore_errors=True)
    return report


def _wait_for_lock(file: IO[str], kind: int) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, kind)


def _upload(
    repository: HubRepository, files: dict[str, Path | bytes], subject: CardSubject, message: str
) -> PushReport:
    """Upload files. A README.md among them is kept if it is the user's, or already describes this repository and these
    weights (`convert push_to=` leaves it with the target); otherwise, a model card is added.
    """
    own = _readme(files)
    is_own = own is not None and CARD_MARK not in own
    if own is None or (not is_own and (subject.evaluations or not evaluation.is_card_of(own, subject))):
        files = {**files, CARD: evaluation.make_card(subject).encode()}
    return repository.upload(files, one_line(message)[:_LONGEST_MESSAGE], has_own_card=is_own)


def _readme(files: Mapping[str, Path | bytes]) -> str | None:
    """The content of the source's README.md, if any."""
    own = files.get(CARD)
    return read_bounded(own, "tokenizer_bytes").decode(errors="replace") if isinstance(own, Path) else None


def _refuse_unshown(files: Mapping[str, Path | bytes], evaluations: Sequence[str]) -> None:
    """Raise ConfigError if there are evaluations but also a user's README.md, which is pushed unchanged."""
    if evaluations and (own := _readme(files)) is not None and CARD_MARK not in own:
        raise ConfigError(
            f"{files[CARD]!s} is pushed as it is, so --evaluations would not be in the model card; remove them, or "
            "move that file away."
        )


@contextmanager
def _advice(text: str) -> Iterator[None]:
    """Add advice to errors of the hub."""
    try:
        yield
    except RemoteError as error:
        raise RemoteError(f"{error} {text}") from error
