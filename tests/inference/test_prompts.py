"""Prompt files: what is read, and the line that is wrong."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from fsdp_shard.errors import ConfigError, DataError
from fsdp_shard.inference.config import GenerateSettings
from fsdp_shard.inference.generation import prompts
from fsdp_shard.inference.generation.prompts import Completion, check_standard_input, format_completion, read_prompts


def settings(path: Path) -> GenerateSettings:
    return GenerateSettings(checkpoint="x", prompts=str(path))


def texts(path: Path) -> list[str]:
    return [prompt.text for prompt in read_prompts(settings(path))]


def test_one_prompt_from_the_command_line() -> None:
    (prompt,) = read_prompts(GenerateSettings(checkpoint="x", prompt=" two\nlines "))
    assert prompt.text == " two\nlines "


def test_a_prompt_of_bytes_that_are_no_text_is_named() -> None:
    with pytest.raises(DataError, match=r"^prompt has half of a surrogate pair"):
        read_prompts(GenerateSettings(checkpoint="x", prompt=b"\xff".decode(errors="surrogateescape")))


def test_both_kinds_of_files(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "one\\ntwo", "id": 3}\n{"prompt": "  ünï "}\n\n', encoding="utf-8")
    assert texts(rows) == ["one\ntwo", "  ünï "]
    lines = tmp_path / "a.txt"
    lines.write_text("one \r\n  two\n\n \n", encoding="utf-8")
    assert texts(lines) == ["one ", "  two"]
    lines.write_bytes("\ufeffone\u2028still one\ntwo ".encode())
    assert texts(lines) == ["one\u2028still one", "two "]
    rows.write_bytes('\ufeff{"prompt": "one\u2028still one"}\n'.encode())
    assert texts(rows) == ["one\u2028still one"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "line 2, is not a row"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"promt": "b"}\n', "line 2, is not JSON"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt" "b"}\n', r"line 2, is not JSON: Expecting ':' delimiter at column 11"),
        ("a.jsonl", '{"prompt": "a", "id": %s}\n' % ("1" * 5000), "line 1, is not JSON: .* 5000 digits"),
        ("a.jsonl", '{"prompt": "a"}\n' + "[" * 100_000 + "\n", "line 2, is not JSON: .* recursion"),
        ("a.jsonl", '["a"]\n', "line 1, is not a row"),
        (
            "a.jsonl",
            '{"prompt": "a", "system": "b"}\n',
            "line 1, has 'system', which would be ignored: write the prompt",
        ),
        ("a.jsonl", '{"prompt": "a", "chat_template_kwargs": {"b": 1}}\n', "line 1, has 'chat_template_kwargs'"),
        ("a.jsonl", '{"prompt": "a", "tools": [{}]}\n', "line 1, has 'tools', which would be ignored"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}], "documents": [{}]}\n', "line 1, has 'documents'"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1}}\n',
            "has 'chat_template_kwargs', which would be ignored: set chat_template_kwargs= for all rows",
        ),
        ("a.jsonl", '{"prompt": "a", "messages": []}\n', "line 1, is not a row"),
        ("a.jsonl", '{"messages": []}\n', "line 1, must have messages such as"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1, ends with a message of the as"),
        ("a.jsonl", '{"messages": [{"role": "model", "content": "a"}]}\n', "line 1, ends with a message of the as"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "\\ud83d"}]}\n', "line 1, has half of a surrogate pair"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', "line 1, has messages, .* set chat=true"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', "line 2, is an empty prompt"),
        ("a.jsonl", '{"prompt": "a \\ud83d"}\n', "line 1, has half of a surrogate pair"),
        ("a.txt", "a\n\nb\n", "line 2, is an empty prompt"),
        ("a.txt", "\n \n", "holds no prompts"),
        ("a.csv", "a\n", "must be a .jsonl file"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=says):
        texts(tmp_path / name)


def test_a_system_message_of_the_row_and_another(tmp_path: Path) -> None:
    chat = GenerateSettings(checkpoint="x", prompts=str(tmp_path / "a.jsonl"), chat=True, system="Be brief.")
    (tmp_path / "a.jsonl").write_text('{"system": "Be wordy.", "messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(DataError, match=r"line 1, has a system message of its own, and system= is another"):
        read_prompts(chat)
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    assert [prompt.text for prompt in read_prompts(chat)] == ["a"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        texts(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        texts(tmp_path / "latin.txt")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, expected in (
        (GenerateSettings(checkpoint="x", prompt="-"), ["one\ntwo"]),
        (GenerateSettings(checkpoint="x", prompts="-"), ["one", "two"]),
    ):
        prompts._standard_input.cache_clear()
        monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
        for _ in range(2):  # once to check, once to work
            assert [prompt.text for prompt in read_prompts(settings)] == expected
    prompts._standard_input.cache_clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo"))
    with pytest.raises(DataError, match="standard input, line 2, is an empty prompt"):
        read_prompts(GenerateSettings(checkpoint="x", prompts="-"))
    prompts._standard_input.cache_clear()


@pytest.mark.parametrize("name", ["prompt", "prompts"])
def test_standard_input_is_for_one_process(name: str) -> None:
    settings = GenerateSettings(checkpoint="x", prompt="-") if name == "prompt" else GenerateSettings("x", prompts="-")
    check_standard_input(settings, is_shared=False)
    check_standard_input(GenerateSettings(checkpoint="x", prompt="a"), is_shared=True)
    with pytest.raises(ConfigError, match=f"{name}=- can be read by one process only"):
        check_standard_input(settings, is_shared=True)


def test_only_the_first_of_many_are_shown() -> None:
    shown = [format_completion(Completion("p", "c\nd", 1), number) for number in range(30)]
    assert shown[0] == "\n> p\n  c\n  d"
    assert shown[10] == "\n..."
    assert set(shown[11:]) == {""}
