"""`data.kind=preference`: prompts with better and worse answers.

A row becomes one example per answer: the chosen one, then each rejected one, which forms a pair with the chosen one
before it; or a single answer, desirable or not. A skipped item becomes an example without tokens whose label holds the
reason: in the place of the rejected answer for a skipped pair, otherwise at the end. `samples.preferences` turns the
examples into samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_shard.data.kinds import chat_spans, kind
from fsdp_shard.data.kinds.chat_template import TemplateSettings, check_template, user_prompt
from fsdp_shard.data.kinds.conversation import Conversation, check_roles
from fsdp_shard.data.kinds.kind import PAIRS, ROWS, Example, Kind, Tokenizer
from fsdp_shard.data.kinds.preference_formats import (
    DESIRABLE,
    EMPTY,
    EMPTY_ANSWER,
    EQUAL,
    UNDESIRABLE,
    Answer,
    ComparedAnswers,
    PreferenceColumns,
    read_compared,
    refuse_labeled,
)
from fsdp_shard.data.sources.row import Row
from fsdp_shard.errors import DataError
from fsdp_shard.models import CAUSAL, SEQUENCE_CLASSIFICATION, tokenizer_files
from fsdp_shard.utils import num_common, setting

PREFERENCE = "preference"


@dataclass(frozen=True)
class PreferenceKind(Kind, PreferenceColumns):
    """Rows of compared answers; with `scored`, a classifier (a reward model) reads prompt and answer as one text."""

    chosen_by, version = "data.kind=preference", "preference-2"

    scored: bool

    @property
    def columns(self) -> tuple[str, ...]:
        named = (self.prompt, self.chosen, self.rejected, self.completion, self.completions)
        others = (self.desirable, self.ranks, self.scores, *filter(None, [self.margin]))
        return tuple(dict.fromkeys((*named, *others, "system", "tools")))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise DataError if `tokenizer` supports neither text nor conversations; which of them is not known yet."""
        if not tokenizer.chat_template:
            self.end(tokenizer)

    def end(self, tokenizer: Tokenizer) -> int:
        if self.scored and tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None:
            return int(tokenizer.sep_token_id)  # [SEP], as in BERT
        return super().end(tokenizer)

    def read(self, row: Row) -> ComparedAnswers:
        self.require(row)
        return read_compared(row, self)

    def check_rows(self, rows: Sequence[Row], samples: str = ROWS) -> bool:
        read = [self.read(row) for row in rows]
        if samples == PAIRS:
            labels = [answer.label for one in read for answer in one.answers]
            refuse_labeled(rows[0].where, sum(label in (DESIRABLE, UNDESIRABLE) for label in labels))
        check_roles(conversations_of(read))
        return any(one.answers for one in read)

    def encode_prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of a user message, or of plain text if the tokenizer has no chat template."""
        return user_prompt(text, tokenizer) if tokenizer.chat_template else super().encode_prompt(text, tokenizer)

    def examples(self, read: list[ComparedAnswers], tokenizer: Tokenizer) -> list[list[Example]]:
        check_roles(conversations_of(read))
        answers = [answer for one in read for answer in one.answers]
        plain = iter(self._plain([one for one in answers if isinstance(one.whole, str)], tokenizer))
        turns = iter(self._turns([one for one in answers if not isinstance(one.whole, str)], tokenizer))
        return [self._row(one, plain, turns) for one in read]

    def _row(self, row: ComparedAnswers, plain: Iterator[Example], turns: Iterator[Example]) -> list[Example]:
        """Return the examples of a row, the next ones of `plain` and `turns`."""
        found = [next(plain if isinstance(answer.whole, str) else turns) for answer in row.answers]
        found = [
            one._replace(label=answer.label, margin=row.margin) for one, answer in zip(found, row.answers, strict=True)
        ]
        if len(found) == 1:
            reasons = ["" if True in found[0].predicted else EMPTY_ANSWER]
        else:
            others = [_why_not(found[0], one) for one in found[1:]]
            reasons = ["", *others]
            if all(others):  # without a pair, the chosen answer is dropped
                found, reasons = found[1:], others
        kept = [
            Example([], [], reason, row.margin) if reason else one for one, reason in zip(found, reasons, strict=True)
        ]
        return kept + [Example([], [], reason, row.margin) for reason in row.skip_reasons]

    def _plain(self, answers: list[Answer], tokenizer: Tokenizer) -> list[Example]:
        """Tokenize text prompts and answers separately, as prompts are at inference."""
        if not answers:
            return []
        begin, end = self._beginning(tokenizer), self.end(tokenizer)
        prompts, texts = (
            kind.plain_ids([str(one) for one in some], tokenizer)
            for some in ([answer.prompt for answer in answers], [answer.whole for answer in answers])
        )
        found = (
            (len(begin) + len(prompt), [*begin, *prompt, *ids, end]) for prompt, ids in zip(prompts, texts, strict=True)
        )
        return [Example(ids, [False] * start + [True] * (len(ids) - start)) for start, ids in found]

    def _beginning(self, tokenizer: Tokenizer) -> list[int]:
        if not self.scored:
            return kind.beginning_tokens(tokenizer)
        first = kind.letter_ids(tokenizer)[:1]  # [CLS] too
        return first if set(first) <= set(tokenizer.all_special_ids) else []

    def _turns(self, answers: list[Answer], tokenizer: Tokenizer) -> list[Example]:
        """Tokenize conversations; the tokens that the chat template adds to the prompt for the answer are predicted."""
        if not answers:
            return []
        check_template(tokenizer, f"{self.chosen_by} with conversations", "give prompts and answers as text")
        rendered = list(_render(answers, tokenizer))
        texts = [text for text, _ in rendered]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            Example(list(ids), chat_spans.inside(offsets, [(start, len(text))]))
            for ids, offsets, (text, start) in zip(
                encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True
            )
        ]


def _why_not(chosen: Example, rejected: Example) -> str:
    """Return the reason why two answers are not a pair, or an empty string if they are."""
    if not (True in chosen.predicted and True in rejected.predicted):
        return EMPTY
    return EQUAL if chosen.ids == rejected.ids else ""


def conversations_of(read: Sequence[ComparedAnswers]) -> list[Conversation]:
    """Return the answers that are conversations, from the prompt on; not those of plain text."""
    return [answer.whole for one in read for answer in one.answers if isinstance(answer.whole, Conversation)]


def _render(answers: list[Answer], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yield conversations as text, with the position of each answer: where the assistant would begin to write.

    Text that a template adds only there, such as empty reasoning, belongs to the answer.
    """
    prompt, known, begun = None, "", ""
    for answer in answers:
        assert isinstance(answer.whole, Conversation)
        text = chat_spans.Renderer(tokenizer, answer.whole).render_prompt(begins_turn=False)
        if answer.prompt != prompt:  # the same for all answers of a row
            prompt = answer.prompt
            known, begun = _render_prompt(prompt, tokenizer)
        if not text.startswith(known):
            raise DataError(
                f"{answer.whole.where}: the chat template of {tokenizer_files(tokenizer)} writes the prompt in another "
                f"way if an answer follows, so it does not show where the answer begins. Set data.chat_template to "
                f"another one."
            )
        yield text, len(begun) if text.startswith(begun) else num_common(begun, text)


def _render_prompt(prompt: str | Conversation, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return a prompt as text without trailing white space, and as text up to where the assistant begins to write."""
    assert isinstance(prompt, Conversation)
    if not prompt.messages:
        return "", ""
    renderer = chat_spans.Renderer(tokenizer, prompt)
    known = renderer.render_prompt(begins_turn=False)
    return known.rstrip(), known if prompt.messages[-1]["role"] == "assistant" else renderer.render_prompt()


@dataclass
class PreferenceSettings(TemplateSettings):
    """Settings of `data.kind=preference`."""

    name = PREFERENCE
    help = "a prompt with answers to compare: chosen and rejected, one with a label, or a ranked list"
    tasks: ClassVar[tuple[str, ...]] = (CAUSAL, SEQUENCE_CLASSIFICATION)

    prompt_column: str = setting(
        "prompt",
        "kind=preference: the column with the prompt, as text or a list of messages. Rows with pairs may lack it; the "
        "prompt is then the common beginning of both answers.",
    )
    chosen_column: str = setting("chosen", "kind=preference: the column with the better answer of a pair.")
    rejected_column: str = setting("rejected", "kind=preference: the column with the worse answer of a pair.")
    completion_column: str = setting(
        "completion", "kind=preference: the column with the answer, in rows with one answer each."
    )
    desirable_column: str = setting(
        "label", "kind=preference: the column that labels the answer in data.completion_column as desirable or not."
    )
    completions_column: str = setting(
        "completions",
        "kind=preference: the column with a list of answers, of which the best forms a pair with each worse one.",
    )
    ranks_column: str = setting(
        "ranks",
        "kind=preference: the column with the rank of each answer in data.completions_column, 1 for the best. Without "
        "ranks and scores, the first answer is the best.",
    )
    scores_column: str = setting(
        "scores", "kind=preference: the column with the scores of these answers, used if there are no ranks."
    )
    margin_column: str | None = setting(
        None, "kind=preference: the column with the margin by which the chosen answer is better, a number."
    )

    def build_kind(self, task: str) -> Kind:
        values = {name: getattr(self, f"{name}_column") for name in _COLUMNS}
        defaults = type(self).__dataclass_fields__
        given = tuple(name for name in _COLUMNS if values[name] != defaults[f"{name}_column"].default)
        return PreferenceKind(
            **values, given=given, roles=dict(self.roles or {}), scored=task == SEQUENCE_CLASSIFICATION
        )


_COLUMNS = ("prompt", "chosen", "rejected", "completion", "completions", "desirable", "ranks", "scores", "margin")
