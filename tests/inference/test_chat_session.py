"""A conversation: what the model is handed, what Ctrl-C does, and the whole of it on a real terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from fsdp_shard.inference.config import GenerationSettings
from fsdp_shard.inference.dispatch import load_dispatched
from fsdp_shard.inference.generation.chat_session import converse
from fsdp_shard.inference.generation.decoder import Answer, Decoder
from fsdp_shard.inference.generation.prefix_cache import PrefixCache
from tests.support.commands import FSDP_SHARD, environment
from tests.support.tiny import byte_tokenizer, llama_config, save_model

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def chatty() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Scripted(Decoder):
    """A decoder whose answers are given: `seen` is what it was asked, as text."""

    def __init__(self, model: Any, answers: list[str]) -> None:
        super().__init__(model, chatty(), GenerationSettings(max_new_tokens=60))
        self.answers, self.seen = answers, list[str]()

    def run(self, batch: Any, on_text: Any = None, prefix_cache: Any = None, is_stopped: Any = None) -> list[Answer]:
        self.seen += self.tokenizer.batch_decode([batch[0]])
        answer = self.answers.pop(0)
        on_text(answer.rstrip("!"))
        for _ in range(answer.count("!")):
            assert not is_stopped()
            signal.raise_signal(signal.SIGINT)
            assert is_stopped()
        return [Answer([])]


def talk(
    model: Any, answers: list[str], *lines: str | type[BaseException], **options: Any
) -> tuple[Scripted, str, int]:
    said: list[str] = []
    left = list(lines)

    def ask(prompt: str) -> str:
        line = left.pop(0) if left else EOFError
        if isinstance(line, str):
            return line
        raise line

    decoder = Scripted(model, answers)
    count = converse(decoder, ask, said.append, 128, **options)
    return decoder, "".join(said), count


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_dispatched(tiny_model, "cpu")


def test_history_goes_along(model: Any) -> None:
    decoder, said, count = talk(model, ["hi", "yes", "new"], "a", "", "b", "/new", "c", "/what", "/quit", "never")
    assert decoder.seen == ["[u]a[a]", "[u]a[a]hi[u]b[a]", "[u]c[a]"]
    assert count == 3
    assert "hi\n" in said
    assert "unknown command /what" in said


def test_ctrl_c_ends_an_answer_and_keeps_what_there_was(model: Any) -> None:
    decoder, said, count = talk(model, ["half!", "rest"], "a", KeyboardInterrupt, "b")
    assert decoder.seen == ["[u]a[a]", "[u]a[a]half[u]b[a]"]
    assert "half [stopped]" in said
    assert count == 2


def test_a_second_ctrl_c_waits_for_no_token(model: Any) -> None:
    class Slow(Scripted):
        def run(self, *args: Any) -> list[Answer]:
            super().run(*args)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("still computing")

    said: list[str] = []
    lines = iter(["a", "/quit"])
    assert converse(Slow(model, ["half!"]), lambda _: next(lines), said.append) == 1
    assert "half [stopped]\n" in "".join(said)


def test_ctrl_c_between_two_tokens_ends_a_real_answer(model: Any) -> None:
    decoder = Decoder(model, chatty(), GenerationSettings(max_new_tokens=60))
    tokens = iter(range(60))
    (answer,) = decoder.run([[5, 6, 7]], is_stopped=lambda: next(tokens) == 3)
    assert len(answer.tokens) == 4


def test_a_full_context_forgets_the_oldest_turns(model: Any) -> None:
    decoder, said, _ = talk(model, ["x", "y", "z"], "1" * 30, "2" * 30, "3" * 200, "4")
    assert decoder.seen == [f"[u]{'1' * 30}[a]", f"[u]{'2' * 30}[a]", "[u]4[a]"]
    assert "oldest turn was dropped" in said
    assert "exceeds the model's context of 128 tokens" in said


def test_the_system_message_stays(model: Any) -> None:
    decoder, said, _ = talk(model, ["x", "y", "z"], "1" * 30, "2" * 30, "/new", "3" * 200, "4", system="S")
    assert decoder.seen == [f"[s]S[u]{'1' * 30}[a]", f"[s]S[u]{'2' * 30}[a]", "[s]S[u]4[a]"]
    assert "oldest turn was dropped" in said
    assert "exceeds the model's context of 128 tokens" in said


class Counted(Decoder):
    """A decoder that notes its rows, and the tokens that the model is run on for each, prompt and answer together."""

    def __init__(self, model: Any, *, cache: str, forgets: bool = False) -> None:
        super().__init__(model, chatty(), GenerationSettings(max_new_tokens=5, cache=cache))
        self.forgets = forgets
        self.rows, self.computed, self.answers = list[list[int]](), list[list[int]](), list[list[int]]()

    def run(self, batch: Any, on_text: Any = None, prefix_cache: Any = None, *others: Any) -> list[Answer]:
        self.rows.append(list(batch[0]))
        self.computed.append([])

        def note(module: Any, args: Any, kwargs: Any) -> None:
            self.computed[-1].append(kwargs["input_ids"].shape[1])

        handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            answers = super().run(batch, on_text, None if self.forgets else prefix_cache, *others)
        finally:
            handle.remove()
        self.answers.append(answers[0].tokens)
        return answers


def _said(decoder: Decoder, *lines: str) -> str:
    said: list[str] = []
    left = iter(lines)
    converse(decoder, lambda _: next(left, "/quit"), said.append)
    return "".join(said)


@pytest.mark.long
@pytest.mark.parametrize("wanted", ["cpu", "disk"])
def test_a_turn_computes_only_what_is_new(tiny_model: Path, wanted: str) -> None:
    lines = ("hello", "and then?", "x", "/new", "help me")
    model = load_dispatched(tiny_model, wanted)
    decoder, forgetful = Counted(model, cache="dynamic"), Counted(model, cache="dynamic", forgets=True)
    assert _said(decoder, *lines) == _said(forgetful, *lines)
    assert decoder.rows == forgetful.rows
    assert decoder.answers == forgetful.answers
    before: list[int] = []
    for row, passes, answer in zip(decoder.rows, decoder.computed, decoder.answers, strict=True):
        common = next((n for n, (a, b) in enumerate(zip(before, row, strict=False)) if a != b), len(before))
        assert passes == [len(row) - min(common, len(row) - 1), *[1] * (len(answer) - 1)]
        before = [*row, *answer[:-1]]
    assert [passes[0] < len(row) for row, passes in zip(decoder.rows, decoder.computed, strict=True)][1:] == [True] * 3
    assert all(passes[0] == len(row) for row, passes in zip(forgetful.rows, forgetful.computed, strict=True))
    without = Counted(model, cache="none")
    assert _said(without, *lines) == _said(decoder, *lines)


def test_a_conversation_follows_its_seed(model: Any) -> None:
    def said(seed: int) -> str:
        parts: list[str] = []
        lines = iter(["one", "two", "/quit"])
        sampling = GenerationSettings(max_new_tokens=12, do_sample=True)
        converse(Decoder(model, chatty(), sampling), lambda _: next(lines), parts.append, seed=seed)
        return "".join(parts)

    assert said(1) == said(1) != said(2)
    assert said(10**20), "a number of any size"


def test_what_an_interruption_leaves_is_not_used(model: Any) -> None:
    decoder, fresh = Counted(model, cache="dynamic"), Counted(model, cache="dynamic")
    cache = PrefixCache()
    first = decoder.run([[5, 6, 7, 8]], prefix_cache=cache)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        decoder.run([[5, 6, 7, 8, 9]], prefix_cache=cache)
    handle.remove()
    assert decoder.run([[5, 6, 7, 8]], prefix_cache=cache) == first
    assert decoder.computed[-1][0] == 4
    assert decoder.run([[5, 6, 7, 1, 2]], prefix_cache=cache) == fresh.run([[5, 6, 7, 1, 2]])
    assert decoder.computed[-1][0] == 2


def test_a_sliding_window_is_not_cut_back(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=257, hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=12, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    decoder, cache = Counted(load_dispatched(tmp_path, "cpu"), cache="dynamic"), PrefixCache()
    rows = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 11])
    assert [decoder.run([row], prefix_cache=cache) for row in rows] == [decoder.run([row]) for row in rows]
    assert [passes[0] for passes in decoder.computed] == [6, 7, 6, 7]


@pytest.mark.long
def test_a_terminal(tmp_path: Path) -> None:
    """On a real pty: Ctrl-C stops the answer and not the program, which /quit then ends."""
    path = save_model(tmp_path / "model")
    config = llama_config()
    config.max_position_embeddings = 1_000_000
    config.save_pretrained(path)
    chatty().save_pretrained(path)
    arguments = [f"run_dir={tmp_path / 'run'}", f"checkpoint={path}", "chat=true", "generation.max_new_tokens=100000"]
    pid, terminal = pty.fork()
    if pid == 0:
        # A program of its own: torch's threads do not survive a fork.
        os.execve(sys.executable, [*FSDP_SHARD, "generate", *arguments], environment())
    try:
        _until(terminal, "> ")
        os.write(terminal, b"hello\n")
        _until(terminal, "hello\r\n")
        time.sleep(2)  # the answer has no end, and no word's end at which a part of it would be shown
        os.write(terminal, b"\x03")
        assert "[stopped]" in _until(terminal, "[stopped]")
        os.write(terminal, b"/quit\n")
        assert "1 completion" in _until(terminal, "per token")
    finally:
        status = _end(pid)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


def _end(pid: int) -> int:
    """The status of a process that should be ending; it is killed if it is not."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _until(terminal: int, text: str) -> str:
    """What the terminal shows, up to `text`."""
    seen, end = "", time.monotonic() + 90
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(end - time.monotonic(), 0))
        assert ready, f"{text!r} does not come after {seen[-500:]!r}"
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:
            raise AssertionError(f"the program ended: {seen[-800:]}") from None
    return seen
