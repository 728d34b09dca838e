"""The commands from Python: alone, with ranks of their own, inside ranks of others, in a thread."""

from __future__ import annotations

import doctest
import json
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import fsdp_shard as fs
from fsdp_shard.errors import CheckpointError, ConfigError
from fsdp_shard.sharding import Fsdp2Config
from tests.support.commands import FSDP_SHARD, free_port, run

SCRIPT = """
import json, os, sys
import torch
import fsdp_shard as fs

if __name__ == "__main__":
    torch.ones(300, 300) @ torch.ones(300, 300)  # the threads of OpenMP would not survive a fork
    figures = fs.finetune(json.loads(sys.argv[1]))
    rank = os.environ.get("RANK", "none")
    print(json.dumps({"rank": rank, "steps": figures.get("steps"), "loss": figures.get("final_loss")}), flush=True)
"""


class _AfterWhatIsPrinted(doctest.OutputChecker):
    """The commands print what they do; the value of the example comes last."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return got.endswith(want)


def settings(model: Path, texts: Path, run_dir: Path, *more: str) -> list[str]:
    """Of a short run on the CPU."""
    fixed = ["train.steps=2", "data.sequence_length=16", "launch.device=cpu", "shard.param_dtype=float32"]
    return [f"model.path={model}", f"data.path={texts}/held_out.txt", f"run_dir={run_dir}", *fixed, *more]


@pytest.mark.parametrize("name", ["finetune", "evaluate", "generate", "plan", "compose_config"])
def test_the_examples_of_the_docs_run(name: str, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    given = {"fs": fs, "model": tiny_model, "text": f"{texts}/held_out.txt", "run_dir": tmp_path / "run"}
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(fs, name), name, globs=given)
    assert found.examples
    assert doctest.DocTestRunner(checker=_AfterWhatIsPrinted()).run(found).failed == 0


def test_scores_are_in_the_completions(tiny_model: Path) -> None:
    given = ["prompt=Once", "generation.max_new_tokens=2", "generation.output_scores=true"]
    (row,) = fs.generate([f"checkpoint={tiny_model}", *given])["completions"]
    assert len(row["log_probabilities"]) == row["num_new_tokens"]


def test_other_line_ends_within_a_prompt_end_no_row(tiny_model: Path) -> None:
    given = [f"checkpoint={tiny_model}", "generation.max_new_tokens=2", "prompt=a\u2028b\x85c"]
    (row,) = fs.generate(given)["completions"]
    assert row["prompt"] == "a\u2028b\x85c"


@pytest.mark.long
def test_the_file_of_completions_is_named_if_it_is_kept(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = [f"checkpoint={tiny_model}", "prompt=Once", "generation.max_new_tokens=2"]
    assert fs.generate(made)["output"] == ""
    assert "written to" not in capfd.readouterr().out
    file = fs.generate([*made, f"run_dir={tmp_path}/kept"])["output"]
    assert Path(file).parent == tmp_path / "kept"
    assert f"written to {file}" in capfd.readouterr().out
    assert len(Path(file).read_text().splitlines()) == 1


@pytest.mark.long
def test_a_plan_returns_the_figures_of_the_command(
    tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"model.path={tiny_model}", "launch.ranks=2", "device=h100"]
    assert run([*FSDP_SHARD, "plan", *given, "run_dir=kept"], tmp_path).status == 0
    figures = fs.plan(given)
    assert capfd.readouterr().out == ""
    written = json.loads(Path("kept/result.json").read_text())
    assert json.loads(json.dumps(figures)) | {"status": "completed"} == written
    assert figures["fits"] is True
    assert fs.plan([*given, "device.memory=2MB"])["fits"] is False, "an answer, not an error"
    with pytest.raises(ConfigError, match=r"run_dir=other has no run to resume, and fs\.plan writes no files"):
        fs.plan([*given, "run_dir=other"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    fs.finetune(settings(tiny_model, texts, tmp_path / "run"))
    before = (tmp_path / "run/result.json").read_text()
    assert fs.plan([*given[:1], "launch.device=cpu", "run_dir=run"])["peak_bytes"] > 0
    assert (tmp_path / "run/result.json").read_text() == before


def test_a_config_made_by_hand_says_what_it_lacks(tiny_model: Path) -> None:
    config = fs.PlanConfig()
    config.model.path = str(tiny_model)
    with pytest.raises(ConfigError, match=r"shard has no wrapper: .*compose_config.*, such as shard=fsdp1\."):
        fs.plan_run(config)
    config.shard = Fsdp2Config()
    with pytest.raises(ConfigError, match=r"optim has no optimizer: .*compose_config.*, such as optim=adafactor\."):
        fs.plan_run(config)


@pytest.mark.long
def test_what_a_run_leaves_is_evaluated_and_generated_from(
    tiny_model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = fs.finetune(settings(tiny_model, texts, tmp_path / "run", f"data.eval_path={texts}/held_out.txt"))
    assert trained["checkpoint"].startswith(str(tmp_path / "run"))
    evaluated = fs.evaluate(
        [
            f"checkpoint={tmp_path}/run",
            f"data.path={texts}/held_out.txt",
            "data.sequence_length=16",
            "dispatch.dtype=keep",
        ]
    )
    assert evaluated["perplexity"] == pytest.approx(trained["perplexity"], rel=1e-5)
    (tmp_path / "mine.yaml").write_text(
        f"checkpoint: {tmp_path}/run\nrun_dir: kept\ndata: {{path: {texts}/held_out.txt}}\n"
    )
    fs.evaluate(["mine.yaml"])
    assert (tmp_path / "kept" / "result.json").is_file(), "the run_dir of a preset counts"
    (tmp_path / "prompts.txt").write_text("first\nsecond\n")
    made = fs.generate([f"checkpoint={tmp_path}/run", "prompts=prompts.txt", "generation.max_new_tokens=2"])
    assert [(row["prompt"], row["num_new_tokens"]) for row in made["completions"]] == [("first", 2), ("second", 2)]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["kept", "mine.yaml", "prompts.txt", "run"], "nothing else is left"


@pytest.mark.slow
def test_ranks_of_its_own_and_ranks_of_others(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    given = {}
    for name, launcher, more in (
        ("alone", [sys.executable], []),
        ("started", [sys.executable], ["launch.ranks=2"]),
        ("joined", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], []),
    ):
        asked = json.dumps(settings(tiny_model, texts, tmp_path / name, *more))
        done = run([*launcher, "script.py", asked], tmp_path, OMP_NUM_THREADS="2")
        assert done.status == 0, done.err
        given[name] = sorted(
            (json.loads(line) for line in done.out.splitlines() if line[:1] == "{"), key=lambda row: row["rank"]
        )
    (alone,), (started,), (first, second) = given["alone"], given["started"], given["joined"]
    assert alone["steps"] == started["steps"] == first["steps"] == 2
    assert started["loss"] == first["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert second == {"rank": "1", "steps": None, "loss": None}


@pytest.mark.long
def test_ranks_of_torchrun_run_one_after_the_other(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    """torchrun's store still has the keys of the first run when the second one starts."""
    (tmp_path / "script.py").write_text(
        "import json, sys\nimport fsdp_shard as fs\nfor given in json.loads(sys.argv[1]):\n    fs.finetune(given)\n"
    )
    asked = [settings(tiny_model, texts, tmp_path / name) for name in ("first", "second")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "script.py", json.dumps(asked)], tmp_path, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    first, second = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("first", "second"))
    assert first["final_loss"] == second["final_loss"]


@pytest.mark.long
def test_a_refused_run_leaves_the_ranks_able_to_start_another(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    """Rank 1 starts it while rank 0 still holds the error, and with it the store of the refused run."""
    (tmp_path / "script.py").write_text(
        "import json, os, sys, time\nimport fsdp_shard as fs\nfrom fsdp_shard.errors import FsdpShardError\n"
        "refused, given = json.loads(sys.argv[1])\n"
        "try:\n    fs.finetune(refused)\n"
        "except FsdpShardError:\n    time.sleep(0 if os.environ['RANK'] == '1' else 2)\nelse:\n    sys.exit(3)\n"
        "fs.finetune(given)\n"
    )
    given = settings(tiny_model, texts, tmp_path / "run", "launch.timeout_seconds=60")
    asked = json.dumps([[*given, "adapter=lora", "adapter.target_modules=[nothing]"], given])
    numbers = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "script.py", asked]
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, command, tmp_path, RANK=rank, LOCAL_RANK=rank, **numbers) for rank in "01"]
        for rank in ranks:
            assert rank.result().status == 0, rank.result().err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2


@pytest.mark.long
def test_no_data_worker_outlives_a_run(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    before = psutil.Process().children()
    streamed = [f"data.path={texts}/train.txt", "data.streaming=true", "data.workers=2", "data.sequence_length=16"]
    fs.finetune(
        [f"model.path={tiny_model}", *streamed, "train.steps=1", f"run_dir={tmp_path}/run", "launch.device=cpu"]
    )
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    assert alive == before


def test_in_a_thread_signals_stay_with_the_program(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    """As Ray's workers call it."""
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        figures = pool.submit(fs.finetune, settings(tiny_model, texts, tmp_path / "run")).result()
    assert figures["steps"] == 2
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
def test_threads_take_turns(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    """Each samples from its own seed, and trains with a process group of its own."""

    def sample(seed: int) -> str:
        given = ["prompt=Once", "generation.max_new_tokens=24", "generation.do_sample=true", f"seed={seed}"]
        return str(fs.generate([f"checkpoint={tiny_model}", *given])["completions"][0]["completion"])

    seeds = [1, 2, 3]
    alone = [sample(seed) for seed in seeds]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(sample, seeds)) == alone
        runs = pool.map(lambda n: fs.finetune(settings(tiny_model, texts, tmp_path / f"run{n}"))["final_loss"], seeds)
        assert len(set(runs)) == 1


@pytest.mark.long
def test_what_the_caller_has_set_changes_no_figures_and_stays(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    lora = ["adapter=lora", "train.neftune_alpha=5"]
    losses, hook = [], sys.excepthook
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        expected = torch.rand(2), random.random(), np.random.rand()
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=number > 0):
                figures = fs.finetune(settings(tiny_model, texts, tmp_path / f"run{number}", *lora))
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(before)
        losses.append(figures["final_loss"])
        assert torch.equal(torch.rand(2), expected[0])
        assert (random.random(), np.random.rand()) == expected[1:]
        assert sys.excepthook is hook
    assert losses == losses[:1] * 3


_IN_HYDRA = """
import sys
import hydra
import fsdp_shard as fs
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

made = [f"checkpoint={sys.argv.pop()}", "prompt=Once", "generation.max_new_tokens=2"]
if sys.argv.pop() == "first":
    fs.generate(made)
ConfigStore.instance().store(name="mine", node={"answer": 42})

@hydra.main(config_path=None, config_name="mine", version_base="1.3")
def main(config):
    (row,) = fs.generate(made)["completions"]
    assert HydraConfig.get().job.config_name == "mine" and HydraConfig.get().job_logging is not None
    print(config.answer, row["num_new_tokens"])

main()
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["first", "within"])
def test_programs_that_use_hydra_themselves(when: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_IN_HYDRA)
    done = run([sys.executable, "program.py", when, str(tiny_model)], tmp_path)
    assert done.status == 0, done.err
    assert done.out.endswith("42 2\n")


@pytest.mark.long
def test_mistakes(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="finetune takes a list of settings"):
        fs.finetune("train.steps=4")
    with pytest.raises(ConfigError, match=r"evaluate takes a list of settings, such as .*, not 3"):
        fs.evaluate(3)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match="generate takes a list of settings"):
        fs.generate("prompt=Once")
    with pytest.raises(ConfigError, match="--cfg is a flag of the command line"):
        fs.finetune(["--cfg", "job"])
    with pytest.raises(ConfigError, match="-m is a flag of the command line, not a setting; compose_config takes"):
        fs.compose_config(fs.FinetuneConfig, ["-m", "train.steps=2,4"])
    with pytest.raises(ConfigError, match=r"compose_config takes a list of settings, such as .*, not 'seed=1'"):
        fs.compose_config(fs.FinetuneConfig, "seed=1")
    with pytest.raises(ConfigError, match="exactly one of prompt=TEXT and prompts=FILE"):
        fs.generate([f"checkpoint={tiny_model}"])
    with pytest.raises(ConfigError, match="a conversation, which is for the terminal"):
        fs.generate([f"checkpoint={tiny_model}", "chat=true"])
    with pytest.raises(ConfigError, match=r"train\.step .*did you mean train\.steps"):
        fs.finetune(settings(tiny_model, texts, tmp_path / "run", "train.step=4"))
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        fs.finetune([f"model.path={tmp_path}/nowhere", f"data.path={texts}/held_out.txt", f"run_dir={tmp_path}/run"])
    assert not (tmp_path / "run").exists()
