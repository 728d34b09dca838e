"""`data.chat_template`: a run trains with it, its checkpoints have it, and a resumed run notices another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fsdp_shard.checkpoint import locate
from fsdp_shard.models import load_tokenizer
from tests.support.runs import run_recipe

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [[{"from": "prompter", "value": f"{i}?"}, {"from": "gpt", "value": "x" * i}] for i in range(1, 20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    data = [f"data.path={tmp_path}/chats.jsonl", "data.kind=chat"]
    data += ["data.roles={prompter: user}", f"data.chat_template={tmp_path}/mine.jinja", "data.sequence_length=64"]
    train = ["train.global_batch_size=4", "optim.lr=3e-3", "train.schedule=constant", "shard.param_dtype=float32"]
    return [f"model.path={tiny_model}", "launch.device=cpu", *data, *train]


@pytest.mark.long
@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_and_its_resumption(settings: list[str], tmp_path: Path, streaming: bool) -> None:
    given = [*settings, f"data.streaming={streaming}", "checkpoint.layout=gathered"]
    whole = run_recipe("finetune", tmp_path / "whole", *given, "train.steps=6")
    assert whole.status == 0, whole.err
    assert load_tokenizer(locate(whole.checkpoint).tokenizer_directory).chat_template == TEMPLATE
    assert run_recipe("finetune", tmp_path / "parts", *given, "train.steps=3", "launch.ranks=2").status == 0
    second = run_recipe("finetune", tmp_path / "parts", *given, "train.steps=6")
    assert second.status == 0, second.err
    assert second.losses == pytest.approx(whole.losses, rel=1e-5)
    (tmp_path / "mine.jinja").write_text(TEMPLATE.replace("<", "["))
    refused = run_recipe("finetune", tmp_path / "parts", *given, "train.steps=9")
    assert refused.status == 2
    assert "differ from those of the run to resume" in refused.err


@pytest.mark.long
def test_the_template_lies_beside_an_adapter(settings: list[str], tmp_path: Path) -> None:
    given = [*settings, "adapter=lora", "train.steps=2"]
    ended = run_recipe("finetune", tmp_path / "run", *given)
    assert ended.status == 0, ended.err
    assert load_tokenizer(locate(ended.checkpoint).tokenizer_directory).chat_template == TEMPLATE
    assert run_recipe("finetune", tmp_path / "run", *given, "train.steps=4").status == 0
    other = [name for name in settings if "chat_template" not in name]
    refused = run_recipe("finetune", tmp_path / "run", *other, "adapter=lora", "train.steps=6")
    assert refused.status == 2
    assert "the model's tokenizer has none" in refused.err


@pytest.mark.long
def test_the_name_of_a_template(settings: list[str], tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = {"default": "{{ messages }}", "short": TEMPLATE, "tool_use": "{{ tools }}"}
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer.save_pretrained(model)
    given = [*settings, f"model.path={model}", "data.chat_template=short"]
    ended = run_recipe("finetune", tmp_path / "run", *given, "train.steps=2")
    assert ended.status == 0, ended.err
    saved = load_tokenizer(locate(ended.checkpoint).tokenizer_directory)
    assert saved.chat_template == {"default": TEMPLATE, "short": TEMPLATE}
    assert run_recipe("finetune", tmp_path / "run", *given, "train.steps=4").status == 0
