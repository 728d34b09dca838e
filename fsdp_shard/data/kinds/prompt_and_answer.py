"""Kinds of rows with a prompt and an answer; only the answer and its end token are predicted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_shard.data.kinds import kind
from fsdp_shard.data.kinds.kind import Example, Kind, Question, Tokenizer


@dataclass(frozen=True)
class PromptKind(Kind):
    """Rows that `read` returns as (prompt, answer).

    Prompt and answer are tokenized separately, as inference tokenizes only the prompt. For a seq2seq model, the
    tokenizer adds the special tokens of source and target.
    """

    seq2seq: bool

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if not self.seq2seq:
            super().check_tokenizer(tokenizer)

    def examples(self, read: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[list[Example]]:
        prompts, answers = map(list, zip(*read, strict=True))
        sources = self._sources(prompts, tokenizer)
        if self.seq2seq:
            targets = tokenizer(text_target=answers, verbose=False)["input_ids"]
        else:
            end = self.end(tokenizer)
            targets = [[*ids, end] for ids in kind.plain_ids(answers, tokenizer)]
        return [
            [Example([*source, *target], [False] * len(source) + [True] * len(target))]
            for source, target in zip(sources, targets, strict=True)
        ]

    def questions(self, read: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Question | None]:
        prompts = [prompt for prompt, _ in read]
        sources = self._sources(prompts, tokenizer) if read else []
        return [Question(prompt, ids, answer) for (prompt, answer), ids in zip(read, sources, strict=True)]

    def _sources(self, prompts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
        if self.seq2seq:
            return kind.token_ids(prompts, tokenizer)
        begin = kind.beginning_tokens(tokenizer)
        return [[*begin, *ids] for ids in kind.plain_ids(prompts, tokenizer)]


def fill(template: str, **values: str) -> str:
    """Replace each {name} in `template` with its value, in one pass, so braces in values have no effect."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)
