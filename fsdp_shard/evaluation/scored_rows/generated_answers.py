"""`task=generation`: scores a model's answers to the data's prompts against the answers in the data."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from transformers import PreTrainedModel

from fsdp_shard.data import Question, QuestionRow, check_task, read_questions
from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.evaluation.config import EvaluateSettings, Figures
from fsdp_shard.evaluation.data_rows import first_fields, skipped_lines
from fsdp_shard.evaluation.earlier_results import remove_earlier
from fsdp_shard.evaluation.evaluation_base import EvaluationBase, LoadModel
from fsdp_shard.evaluation.provenance import provenance
from fsdp_shard.evaluation.scored_rows.answer_metrics import Metric, score_answers
from fsdp_shard.evaluation.scored_rows.row_scores import (
    Intervals,
    interval_text,
    write_predictions,
)
from fsdp_shard.inference import (
    Completion,
    Decoder,
    GenerationSettings,
    KVCacheBudget,
    Prompt,
    check_generates,
    complete,
)
from fsdp_shard.models import CAUSAL, SEQ2SEQ, check_vocabulary, context_length_of, load_config
from fsdp_shard.utils import format_count, format_table, report_progress


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswers(EvaluationBase):
    """The answers of the model in `settings.checkpoint` to the questions in `rows`, some of which are skipped."""

    rows: tuple[QuestionRow, ...]

    @property
    def _asked(self) -> list[tuple[QuestionRow, Question]]:
        return [(row, row.question) for row in self.rows if row.question is not None]

    def describe(self) -> str:
        """Describe the number of prompts, the skipped rows, and the metrics."""
        scoring, asked = self.settings.scoring, self._asked
        missing = f" ({' and '.join(scoring.missing_metrics)} need the extra `eval`)" if scoring.missing_metrics else ""
        lengths = [len(question.ids) for _, question in asked]
        prompts = f"{format_count(len(asked), 'prompt')} of up to {format_count(max(lengths), 'token')}"
        skipped = [(row.where, row.skip_reason) for row in self.rows if row.skip_reason]
        return "\n".join(
            [
                *skipped_lines(skipped),
                f"{prompts}, answered greedily in up to {format_count(scoring.max_new_tokens, 'token')}",
                f"metrics: {', '.join(scoring.chosen_metrics)}{missing}",
            ]
        )

    def measure(self, load: LoadModel) -> Figures:
        """Answer all prompts, longest first, and score the answers.

        Args:
            load: Loads the model.

        Returns:
            The figures, on rank 0.

        Raises:
            LossError: A logit is not finite.
            ModelError: The model cannot be run.
        """
        ranks = self.ranks
        if ranks.is_main:
            remove_earlier(self.run_dir)
        scoring, asked = self.settings.scoring, self._asked
        longest = max(len(question.ids) for _, question in asked)
        budget = KVCacheBudget(min(self.settings.batch_size, len(asked)), longest + scoring.max_new_tokens)
        model, start = load(self.settings.source, budget), time.perf_counter()
        completions = self._answer(model)
        if not ranks.is_main:
            return Figures("", {})
        seconds = time.perf_counter() - start
        references = [question.reference for _, question in asked]
        answers = [one.completion for one in completions]
        metrics, notes = score_answers(scoring.chosen_metrics, answers, references)
        num_at_limit = sum(one.num_new_tokens == scoring.max_new_tokens for one in completions)
        if num_at_limit:
            many = "answer has" if num_at_limit == 1 else "answers have"
            notes.append(
                f"{num_at_limit:,} {many} scoring.max_new_tokens={scoring.max_new_tokens} tokens, and may lack an end"
            )
        return self._figures(completions, metrics, notes, {"num_at_limit": num_at_limit, "seconds": seconds})

    def _answer(self, model: PreTrainedModel) -> list[Completion]:
        """Return the answers in order, on rank 0; none on others."""
        scoring, asked = self.settings.scoring, self._asked
        prompts = [Prompt(question.prompt, row.where) for row, question in asked]
        encoded = [question.ids for _, question in asked]
        settings = GenerationSettings(max_new_tokens=scoring.max_new_tokens, batch_size=self.settings.batch_size)
        found = list[Completion]()
        with report_progress(len(prompts), "evaluate", "prompts") as count:
            for one in complete(Decoder(model, self.tokenizer, settings), prompts, encoded, context=self.context):
                found.append(one)
                count(1)
        return found

    def _figures(
        self, completions: Sequence[Completion], metrics: Sequence[Metric], notes: list[str], others: dict[str, Any]
    ) -> Figures:
        """Write the rows, and return the figures with their intervals."""
        intervals = Intervals(self.settings.scoring.num_resamples, self.seed)
        ends = {metric.name: intervals.of(metric.values, metric.sizes) for metric in metrics}
        table = [["metric", "value", "95 % interval"]]
        table += [[one.name, f"{one.figure:.4f}", interval_text(ends[one.name])] for one in metrics]
        written = write_predictions(self, self._rows(completions, metrics))
        row = {metric.name: metric.figure for metric in metrics} | {
            "metrics": self.settings.scoring.chosen_metrics,
            "num_prompts": len(completions),
            "num_new_tokens": sum(one.num_new_tokens for one in completions),
            "left_out": dict(Counter(row.skip_reason for row in self.rows if row.skip_reason)),
            "notes": notes,
            **others,
            **intervals.row(ends),
            "provenance": self._provenance(),
        }
        lines = [*format_table(table), *notes, *written]
        return Figures("\n".join([f"{format_count(len(completions), 'answer')}", *lines]), row)

    def _rows(self, completions: Sequence[Completion], metrics: Sequence[Metric]) -> list[dict[str, Any]]:
        """Return the rows of predictions.jsonl."""
        rows, number = list[dict[str, Any]](), 0
        for index, asked in enumerate(self.rows):
            row = first_fields(index, asked.where, asked.name)
            if asked.question is None:
                row["left_out"] = asked.skip_reason
            else:
                row |= {"prompt": asked.question.prompt, "reference": asked.question.reference}
                row |= {"answer": completions[number].completion, "num_new_tokens": completions[number].num_new_tokens}
                row |= {metric.name: metric.of(number) for metric in metrics}
                number += 1
            rows.append(row)
        return rows

    def _provenance(self) -> dict[str, Any]:
        scoring = self.settings.scoring
        settled = {
            "metrics": scoring.chosen_metrics,
            "max_new_tokens": scoring.max_new_tokens,
            "num_resamples": scoring.num_resamples,
        }
        digest = xxhash.xxh3_128()
        for _, question in self._asked:
            digest.update(json.dumps([question.ids, question.reference]).encode())
        return provenance(self, settled, digest.hexdigest())


def open_generation(base: EvaluationBase) -> GeneratedAnswers:
    """Read and tokenize the prompts.

    Raises:
        DataError: The data cannot be read, or no prompt is left.
        ModelError: The tokenizer belongs to another model.
    """
    settings = base.settings
    trust, most = settings.dispatch.trust_remote_code, settings.scoring.max_new_tokens
    config = load_config(settings.source.config_directory, trust)
    length = context_length_of(config, trust).length
    has_encoder = bool(config.is_encoder_decoder)
    room = None if length is None else length - (0 if has_encoder else most)
    beyond = f"beyond the model's context of {length} tokens" + ("" if has_encoder else f" with {most} new tokens")
    rows = list[QuestionRow]()
    for row in read_questions(settings.data, base.tokenizer, SEQ2SEQ if has_encoder else CAUSAL):
        ids = row.question.ids if row.question is not None else []
        check_vocabulary(ids, config)
        rows.append(row._replace(question=None, skip_reason=beyond) if room is not None and len(ids) > room else row)
    if all(row.question is None for row in rows):
        why = "; ".join(skipped_lines([(row.where, row.skip_reason) for row in rows]))
        raise DataError(
            f"{settings.data.eval_path or settings.data.path} has no prompt to answer: {why}. Give other data"
            + (f", or fewer scoring.max_new_tokens than {most}." if beyond in why and not has_encoder else ".")
        )
    return GeneratedAnswers(**vars(base), rows=tuple(rows))


def check_answering(settings: EvaluateSettings) -> None:
    """Check that the model can answer such data, and has room for an answer.

    Raises:
        ModelError: The model does not generate text.
        ConfigError: The data does not suit the model, or its context has no room.
    """
    trust, most = settings.dispatch.trust_remote_code, settings.scoring.max_new_tokens
    config = load_config(settings.source.config_directory, trust)
    check_generates(config)
    if config.is_encoder_decoder:
        check_task(SEQ2SEQ, settings.data)
    length = context_length_of(config, trust).length
    least = 0 if config.is_encoder_decoder else 1  # tokens of a prompt
    if length is not None and most > length - least:
        raise ConfigError(
            f"scoring.max_new_tokens={most} leaves no room in the model's context of {length} tokens; give at most "
            f"{length - least}."
        )
