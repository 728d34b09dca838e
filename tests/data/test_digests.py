"""Digests of tokenized data are those of version 0.1.0, so that its runs resume."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from fsdp_shard.data.config import DataConfig
from fsdp_shard.data.pipeline import tokenize_all
from tests.data.conftest import byte_tokenizer
from tests.data.data_files import write

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer(name: str) -> Any:
    tokenizer = byte_tokenizer()
    if name == "large":
        tokenizer.add_tokens([f"<{number}>" for number in range(66_000)])
    if name == "begins":
        tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
        begin = [("<|begin|>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
    if name == "masks":
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    if name == "chat":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
    return tokenizer


def _rows() -> list[dict[str, Any]]:
    """700 rows, of which some are empty: more than the 256 of which a digest takes the arrays together."""
    rows = []
    for number in range(700):
        text = "" if number % 9 == 4 else f'{number}: "ä, \U0001f600 <65999>"\n' + "word " * (number * 7 % 41)
        said = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": text or "."}]
        label = ["good", 2, "", "bad", "1", None][number % 6] if number > 1 else "late"
        row = {"text": text, "other": f"to {number}", "label": label}
        rows.append(row | {"messages": said[: 1 if number % 13 == 5 else 2]})
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rows = tmp_path_factory.mktemp("rows"), _rows()
    write(root / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with (root / "a.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["text", "other", "label"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    table = pyarrow.table({name: [row[name] for row in rows] for name in ("text", "other", "messages")})
    pyarrow.parquet.write_table(table, root / "a.parquet", row_group_size=100)
    write(root / "a.txt", "\ufeff" + "\n\n".join(row["text"] for row in rows))
    write(root / "d" / "z.md", "the last\r\n")
    write(root / "d" / "b" / "c.txt", "the first")
    write(root / "d" / "b.txt", "the second\n\n")
    return root


PAIRS = {"kind": "pairs", "source_column": "other", "target_column": "text"}
INSTRUCTION = {"kind": "instruction", "instruction_column": "other", "response_column": "text"}

CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("a.jsonl", {}, "causal_lm", "plain", "059762ddc74a63bfdc37049bd364d857"),
    ("a.csv", {}, "causal_lm", "plain", "059762ddc74a63bfdc37049bd364d857"),
    ("a.parquet", {}, "causal_lm", "plain", "059762ddc74a63bfdc37049bd364d857"),
    ("a.txt", {}, "causal_lm", "plain", "0b6ba47f5ec1119d902012bdaffb5904"),
    ("a.txt", {"sample_by": "paragraph"}, "causal_lm", "begins", "1c213288732c2f48ae04154870e96863"),
    ("a.txt", {"sample_by": "line"}, "causal_lm", "large", "77fa530ddbf13dac694b54fe643323f0"),
    ("d", {}, "causal_lm", "plain", "25cc469e41bb955d41ca5ee10a6d7997"),
    ("a.jsonl", {}, "masked_lm", "masks", "059762ddc74a63bfdc37049bd364d857"),
    ("a.jsonl", {}, "causal_lm", "begins", "feaed2491bc36e73bbd0c8629ad59fa5"),
    ("a.jsonl", {"packing": True}, "causal_lm", "plain", "6de736df333596cb6f45491ad38347bb"),
    ("a.csv", {"packing": True}, "causal_lm", "large", "3056329a1fe81d674b06673e4477f3ae"),
    ("a.txt", {"packing": True}, "causal_lm", "begins", "97c5f2478c361f13c59fc01a4d6e25e3"),
    ("a.jsonl", PAIRS, "causal_lm", "plain", "63664653f7b5c691d4751bf02a31f4bb"),
    ("a.parquet", PAIRS, "seq2seq", "begins", "648efef3f7e45bf753863b439697836f"),
    ("a.csv", INSTRUCTION, "causal_lm", "plain", "3896201d80fafdc08e1ec23e51d5198e"),
    ("a.jsonl", {"kind": "chat"}, "causal_lm", "chat", "6cd9fcca17bd49210750b69f68c7e0be"),
    ("a.parquet", {"kind": "chat"}, "causal_lm", "chat", "6cd9fcca17bd49210750b69f68c7e0be"),
    ("a.jsonl", {}, "sequence_classification", "plain", "b67e1655498c710f5bc304304b8e6c99"),
    ("a.csv", {}, "sequence_classification", "begins", "a50c8c0d32861add7b9873540c5b1a26"),
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("path", "settings", "task", "name", "digest"), CASES)
def test_digests(
    files: Path, tmp_path: Path, path: str, settings: dict[str, Any], task: str, name: str, digest: str, workers: int
) -> None:
    config = DataConfig(
        path=str(files / path), sequence_length=32, workers=workers, cache_dir=str(tmp_path), **settings
    )
    assert tokenize_all(config, _tokenizer(name), task).train[""].digest == digest
