"""`fsdp-shard report`: runs compared, damage counted, and a page that runs and asks for nothing from files."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_shard.checkpoint import FileRecord, Manifest, StepStore
from fsdp_shard.errors import InputError
from fsdp_shard.evaluation.report.comparison import build_report, compare
from fsdp_shard.evaluation.report.html_page import to_html
from fsdp_shard.evaluation.report.report_command import ReportFiles, report_runs
from fsdp_shard.evaluation.report.report_data import Report, Table
from fsdp_shard.evaluation.report.run_charts import thin_out
from fsdp_shard.evaluation.report.run_files import find_runs, read_run
from fsdp_shard.evaluation.report.same_weights import WeightDigests
from fsdp_shard.evaluation.report.setting_changes import SettingChange
from fsdp_shard.evaluation.report.svg_charts import nice_ticks, style_of
from fsdp_shard.evaluation.report.tables import to_csv, to_markdown
from fsdp_shard.evaluation.report.terminal import WIDTH, to_text
from tests.support.commands import fsdp_shard, run
from tests.support.tiny import save_model

_ATTACK = "</script><script>alert(1)</script><img src=http://example.com/x onerror=alert(2)>"


def _run(path: Path, lr: str = "0.001", num_steps: int = 5, prompt: str = "Once", held_out: bool = True) -> Path:
    """The files of a run, as `finetune` writes them."""
    path.mkdir(parents=True)
    settings = f"optim:\n  lr: {lr}\ntrain:\n  steps: {num_steps}\nrun_dir: {path.name}\n"
    head = "# To repeat this run: fsdp-shard finetune THIS_FILE run_dir=NEW\ndefaults:\n- adapter: none\n"
    (path / "config.yaml").write_text(head + settings)
    rows = [
        {"step": step, "loss": 5 - step / 10, "tokens": 8, "step_seconds": 2.0, "memory_bytes": 1 << 20}
        for step in range(1, num_steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if held_out:
        (path / "evaluations.jsonl").write_text('{"step": 0, "loss": 6.0}\n{"step": 5, "loss": 4.0}\n')
    (path / "samples.jsonl").write_text(json.dumps({"step": 5, "prompt": prompt, "completion": _ATTACK}) + "\n")
    (path / "result.json").write_text(json.dumps({"status": "completed", "tokens": 40}))
    return path


def _report(*paths: Path) -> Report:
    return build_report([str(path) for path in paths], WeightDigests())


def _table(report: Report, key: str) -> Table:
    return next(table for table in report.tables if table.key == key)


def test_runs_are_side_by_side(tmp_path: Path) -> None:
    report = _report(_run(tmp_path / "a"), _run(tmp_path / "b", lr="0.1"))
    assert report.runs == ["a", "b"]
    assert report.problems == []
    assert [cell.value for cell in _table(report, "runs").rows[0][1:8]] == ["completed", 5, 4.5, 4.0, 6.0, 4.0, 5]
    assert _table(report, "runs").columns[5] == "at step 0", "which the best one need not be lower than"
    assert [[cell.text for cell in row] for row in _table(report, "settings").rows] == [["optim.lr", "0.001", "0.1"]]
    assert _table(report, "settings").rows[0][2].is_marked
    assert _table(report, "speed").rows[0][2].value == 4.0
    assert _table(report, "speed").columns[3] == "median s/step", "which is not that of tokens/s"
    text = to_text(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "optim.lr  0.001  0.1" in text
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [(row["run"], row["loss"], row["optim.lr"]) for row in rows] == [("a", "4.5", "0.001"), ("b", "4.5", "0.1")]
    assert "| optim.lr | 0.001 | **0.1** |" in to_markdown(report)
    for others in (_report(tmp_path / "a", tmp_path / "b"), _report(tmp_path / "a", _run(tmp_path / "c"))):
        assert "whether earlier ones had others is not recorded" in _table(others, "settings").note, (
            "there are no steps"
        )


def test_losses_have_the_unit_of_what_is_trained(tmp_path: Path) -> None:
    added = {
        "nats per token": "",
        "nats per text": "model: {task: sequence_classification}\n",
        "the unit of a loss of one's own": "loss: mine:f\n",
        "units of the objective per sample": "",
    }
    runs = []
    for number, (unit, more) in enumerate(added.items()):
        runs.append(_run(tmp_path / str(number)))
        config = (runs[-1] / "config.yaml").read_text() + more
        if unit.endswith("sample"):
            config = config.replace("- adapter: none\n", "- adapter: none\n- objective: dpo\n")
        (runs[-1] / "config.yaml").write_text(config)
        report = _report(runs[-1])
        assert f"Losses in {unit}: of the last step" in _table(report, "runs").note
        assert [chart.y_label for chart in report.charts if chart.key in ("loss", "held-out")] == [unit, unit]
    assert f"Losses in {' or '.join(added)}: " in _table(_report(*runs), "runs").note


def test_what_an_older_run_recorded_of_a_signature_is_not_shown(tmp_path: Path) -> None:
    for name in ("a", "b"):
        file = _run(tmp_path / name) / "config.yaml"
        file.write_text(f"{file.read_text()}data: {{path: 'https://host/{name}?sig=secret'}}\n")
    table = to_csv(_report(tmp_path / "a", tmp_path / "b"))
    assert "https://host/a?sig=***" in table
    assert "secret" not in table


def test_held_out_sets_and_the_memory_of_ranks(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    sets = [{"code": {"loss": 3.0, "perplexity": 20.1, "num_tokens": 5}, "a/b": {"loss": 1.5}}, {"code": 7, "c": None}]
    rows = [{"step": step, "loss": 4.0, "sets": sets[0]} for step in (0, 5)] + [
        {"step": 9, "loss": 3.0, "sets": sets[1]}
    ]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    (path / "result.json").write_text(json.dumps({"status": "completed", "peak_memory_bytes_by_rank": [1024, 4096]}))
    report = _report(path)
    found = [[cell.value for cell in row] for row in _table(report, "held-out-sets").rows]
    assert found == [["a", "code", 3.0, 20.1, 5, 3.0], ["a", "a/b", 1.5, None, None, 1.5]]
    (memory,) = _table(report, "memory-by-rank").rows
    assert [cell.value for cell in memory] == ["a", 2, 1024, 2560, 4096, 1, 1024, 4096]

    (path / "evaluations.jsonl").write_text(json.dumps(rows[2]) + "\n")
    (path / "result.json").write_text(json.dumps({"peak_memory_bytes_by_rank": [1024, "x"]}))
    keys = {table.key for table in _report(path).tables}
    assert not keys & {"held-out-sets", "memory-by-rank"}


def test_evaluations_of_other_held_out_data_are_left_out(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    given = [(0, 6.0, "first"), (2, 1.0, "first"), (4, 4.0, "second"), (5, 3.5, "second")]
    rows = [{"step": at, "loss": loss, "held_out": held_out} for at, loss, held_out in given]
    rows = [{**row, "metrics": {"m": row["loss"]}, "sets": {"code": {"loss": row["loss"]}}} for row in rows]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = _report(path)
    assert report.problems == [
        f"{path}/evaluations.jsonl: 2 lines left out that are of other held-out data than later."
    ]
    assert [cell.value for cell in _table(report, "runs").rows[0][4:8]] == [3.5, None, 3.5, 5]
    assert [cell.value for cell in _table(report, "held-out-metrics").rows[0]] == ["a", "m", 4.0, 3.5]
    assert _table(report, "held-out-sets").rows[0][-1].value == 4.0
    (curve,) = next(chart for chart in report.charts if chart.key == "held-out").curves
    assert curve.points == [(4, 4.0), (5, 3.5)]

    state = {"held_out": "first", "best_loss": 1.0, "best_step": 2, "loss_before": 6.0}
    for number in (2, 5):
        step = path / "checkpoints" / f"step-{number:08d}"
        step.mkdir(parents=True)
        (step / "trainer.json").write_text(json.dumps(state))
    of_first, of_second = (read_run(path, "a", path / "checkpoints" / f"step-{number:08d}") for number in (2, 5))
    assert [row["step"] for row in of_first.held_out] == [0, 2], "a step knows nothing of later ones"
    assert of_first.state == state
    assert of_second.state == {"held_out": "first"}, "whose best loss was saved before the data changed"


def test_skipped_steps_are_told(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[3:] = [{**row, "loss": None, "skipped": count + 1} for count, row in enumerate(rows[3:])]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = _table(_report(path, _run(tmp_path / "b")), "runs")
    assert (table.columns[-1], [row[-1].value for row in table.rows]) == ("skipped", [2, None])
    assert table.rows[0][3].value == 4.7
    assert "the loss is that of the last step where it was" in table.note, "finite"
    assert "skipped" not in _table(_report(tmp_path / "b"), "runs").columns


def test_held_out_losses_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    rows = [json.loads(line) for line in (path / "evaluations.jsonl").read_text().splitlines()]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row | {"loss": None}) + "\n" for row in rows))
    report = _report(path)
    assert "held-out" not in [chart.key for chart in report.charts]
    assert "held-out loss" in to_text(report)


def _evaluation(path: Path, digest: str, dispatch: dict[str, str]) -> Path:
    """The files of an evaluation, as `evaluate` writes them."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("# To repeat this run: fsdp-shard evaluate THIS_FILE run_dir=NEW\nbase: null\n")
    settings = {"task": "perplexity", "dispatch": {"dtype": "keep", "quantize": "none"} | dispatch}
    provenance = {"data": {"path": "a.jsonl", "digest": digest}, "settings": settings}
    (path / "result.json").write_text(json.dumps({"status": "completed", "loss": 1.5, "provenance": provenance}))
    return path


def test_other_data_have_another_digest(tmp_path: Path) -> None:
    """Of rows, the digest is an identity with more in it, and tables show twelve characters."""
    given = [f"CausalRows:{'ab' * 15}{part:02x}:8/128" for part in range(2)] + ["cd" * 16]
    report = _report(*(_evaluation(tmp_path / str(at), digest, {}) for at, digest in enumerate(given)))
    shown = [row[-2] for row in _table(report, "evaluations").rows]
    assert [cell.value for cell in shown] == given
    assert len({cell.text for cell in shown}) == 3
    assert all(re.fullmatch("[0-9a-f]{12}", cell.text) for cell in shown)
    assert shown[2].text == "cd" * 6


def test_an_evaluation_alone_says_that_other_weights_computed(tmp_path: Path) -> None:
    for name, dispatch in {"plain": {}, "cast": {"dtype": "bfloat16"}, "packed": {"quantize": "int8"}}.items():
        (row,) = _table(_report(_evaluation(tmp_path / name, "ab" * 16, dispatch)), "evaluations").rows
        assert row[2].value == next((f"dispatch.{key}={value}" for key, value in dispatch.items()), None)


def test_metrics_have_curves_and_a_table(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        rows = [json.loads(line) for line in (path / name).read_text().splitlines()]
        for row in rows:
            row["metrics"] = {"rewards/margins": row["step"] / 8, "odd/loss": None, "<b>": "text"}
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = _report(path, _run(tmp_path / "b"))
    (chart,) = [chart for chart in report.charts if chart.title == "rewards/margins"]
    assert [curve.is_dotted for curve in chart.curves] == [False, True]
    assert chart.curves[0].points[-1] == (5.0, 5 / 8)
    table = _table(report, "held-out-metrics")
    assert [cell.text for cell in table.rows[0]][:2] == ["a", "rewards/margins"]
    assert not [table for table in report.tables if table.key == "held-out-sets"], "a metric is no set"


def test_of_tasks_only_measures_are_figures(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    measures = {"alias": "capitals", "sample_len": 5, "acc,none": 0.25, "acc_stderr,none": 0.125, "acc,first": 0.5}
    (path / "config.yaml").write_text("# To repeat this run: fsdp-shard evaluate task=lm_eval\n{}\n")
    (path / "result.json").write_text(json.dumps({"results": {"capitals": measures}}))
    rows = [[cell.text for cell in row[3:7]] for row in _table(_report(path), "tasks").rows]
    assert rows == [["capitals", "acc", "0.2500", "0.1250"], ["capitals", "acc (first)", "0.5000", "-"]]


def test_a_sample_of_white_space_is_no_gap(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    (path / "samples.jsonl").write_text(json.dumps({"step": 5, "prompt": "Once", "completion": " \n "}) + "\n")
    assert to_text(_report(path)).endswith("  Once\n    a, step 5: (white space)")


def test_a_sweep_has_its_table_and_picture(tmp_path: Path) -> None:
    for at, lr in enumerate(("0.1", "0.001", "0.01")):
        _run(tmp_path / "sweep" / str(at), lr)
    report = _report(tmp_path / "sweep")
    assert _table(report, "sweep-sweep").columns[1] == "optim.lr"
    (picture,) = report.sweeps
    assert picture.categories == ["0.001", "0.01", "0.1"]
    assert picture.curves[0].points == [(0, 4.0), (1, 4.0), (2, 4.0)]


def test_a_sweep_with_a_resumed_run_says_what_changed(tmp_path: Path) -> None:
    """Its figures are of all of its steps, where result.json has those since it was resumed."""
    for at, lr in enumerate(("0.0001", "0.001")):
        _run(tmp_path / "sweep" / str(at), lr)
    resumed = tmp_path / "sweep" / "0"
    later = {"tokens_per_second": 9.0, "peak_memory_bytes": 1 << 10}
    (resumed / "result.json").write_text(json.dumps({"status": "completed", **later}))
    runs = [read_run(tmp_path / "sweep" / str(at), str(at)) for at in range(2)]
    runs[0] = replace(runs[0], changes=[SettingChange(3, "optim.lr", "0.01", "0.0001")])
    report = compare(runs, WeightDigests())
    course = "0.01 until step 3, then 0.0001"
    row = _table(report, "sweep-sweep").rows[0]
    assert [cell.value for cell in row[1:6]] == [course, 4.5, 4.0, 4.0, 1 << 20]
    assert [row[at].value for row in _table(report, "speed").rows[:1] for at in (2, 5)] == [4.0, 1 << 20]
    (picture,) = report.sweeps
    assert picture.categories == ["0.001", course]


def test_damage_is_counted(tmp_path: Path) -> None:
    path = _run(tmp_path / "a", held_out=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 4.\n[]\n{"step": 7, "loss": "low"}\n{"step": 5, "loss": 4.25}\n')
    (path / "result.json").write_text("{")
    report = _report(path)
    said = "\n".join(report.problems)
    assert "2 damaged lines left out of 9" in said
    assert "1 line left out that have no number as their loss" in said
    assert "1 line left out whose step has a later line" in said
    assert "result.json is not valid JSON" in said
    assert "1 run with no held-out evaluations (train.eval_every): a." in said
    assert _table(report, "runs").rows[0][1].value == "stopped"
    assert "2 damaged lines" in to_html(report)
    assert "2 damaged lines" in to_text(report)


def test_a_step_that_lacks_a_file_is_told(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    store = StepStore(path / "checkpoints")
    for step in (2, 4):
        (directory := store.begin(step)).joinpath("data").write_text("x")
        store.commit(directory, step, Manifest("gathered", step, files={"data": FileRecord(1)}))
    assert [step.is_complete for step in read_run(path, "a").checkpoints] == [True, True]
    (store.path(2) / "data").write_text("xx")
    found = read_run(path, "a")
    assert [step.is_complete for step in found.checkpoints] == [False, True]
    said = "step-00000002 lacks files of its manifest, or has them in another size."
    assert [problem.rpartition("/")[2] for problem in found.problems] == [said]


def test_a_run_that_failed_shows_its_error(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    figures = (path / "result.json").read_text()
    (path / "result.json").unlink()
    (path / "error.txt").write_text(f"The loss {_ATTACK} is nan.\n\nTraceback (most recent call last):\n")
    report = _report(path, _run(tmp_path / "b"))
    assert [row[1].value for row in _table(report, "runs").rows] == ["failed", "completed"]
    assert report.failures == [f"a: The loss {_ATTACK} is nan."]
    assert "Failed" in to_html(report)
    assert _ATTACK not in to_html(report)
    assert "Failed\n  a: The loss" in to_text(report)
    (path / "result.json").write_text(figures)  # which is written last
    assert _report(path).failures == []


def test_nothing_from_files_is_markup(tmp_path: Path) -> None:
    path = _run(tmp_path / "<b>=1+1", prompt=_ATTACK)
    (path / "config.yaml").write_text("# To repeat this run: fsdp-shard finetune X\na: '</style><script>alert(3)'\n")
    report = _report(path, _run(tmp_path / "b"))
    page = to_html(report)
    assert page.count("<script") == page.count("</script>") == 2
    assert page.count("<style>") == page.count("</style>") == 1
    assert "<img" not in page
    assert "<b>" not in page
    assert not re.search(r'(src|href)=(?!"(#|data:,))', re.sub(r"&lt;.*?&gt;", "", page))
    assert "default-src &#39;none&#39;" in page
    assert "<b>" not in to_markdown(report).replace("\\<b\\>", "")
    assert 'http-equiv="refresh"' not in page
    assert 'http-equiv="refresh"' in to_html(report, reload_seconds=5)


def test_a_locked_run_is_under_way(tmp_path: Path) -> None:
    path = _run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = _report(path)
        assert (report.num_running, report.problems) == (1, [])
    assert _report(path).num_running == 0


def test_files_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _run(tmp_path / "a")
    page = tmp_path / "page.html"
    report_runs([str(path)], ReportFiles(html=str(page)), watch=True)
    assert "No run is under way any more." in capsys.readouterr().out
    assert 'http-equiv="refresh"' not in page.read_text()
    with pytest.raises(InputError, match=r"must end in \.html"):
        report_runs([str(path)], ReportFiles(html=str(path / "result.json")))
    with pytest.raises(InputError, match="there is no directory"):
        report_runs([str(path)], ReportFiles(csv=str(tmp_path / "no" / "a.csv")))


def test_a_run_that_is_given_twice_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_run(tmp_path / "runs" / name) for name in ("b", "a")]
    (tmp_path / "link").symlink_to(runs[0])
    monkeypatch.chdir(tmp_path)
    assert find_runs(["runs/b", str(runs[0]), "link", "runs"]) == [Path("runs/b"), Path("runs/a")]


def test_the_command_names_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = fsdp_shard("report", "empty", cwd=tmp_path)
    assert done.status == 2
    assert done.error.startswith("error: empty is not a run, and has none in it")
    assert fsdp_shard("report", "gone", cwd=tmp_path).error.startswith("error: gone is not a directory")


@pytest.mark.long
def test_what_runs_really_leave(tmp_path: Path) -> None:
    """Files by `finetune` on two ranks and by `evaluate`, whose weights are found again in a copy elsewhere."""
    save_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a run, and what is left of it. " * 60)
    common = ["data.path=text.txt", "data.sequence_length=16"]
    trained = ["model.path=model", *common, "data.eval_fraction=0.2", "launch.device=cpu", "train.steps=2"]
    trained += ["launch.ranks=2", "train.sample_prompts=[a run]", "train.sample_tokens=4", "run_dir=runs/one"]
    assert fsdp_shard("finetune", *trained, cwd=tmp_path).status == 0
    assert fsdp_shard("convert", "source=runs/one", "target=copy", "run_dir=other", cwd=tmp_path).status == 0
    assert fsdp_shard("evaluate", "checkpoint=copy", *common, "run_dir=runs/two", cwd=tmp_path).status == 0
    other = json.loads((tmp_path / "model" / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "eps").mkdir()
    (tmp_path / "eps" / "config.json").write_text(json.dumps(other))
    given = ["checkpoint=copy", "config=eps", "tokenizer=model", "run_dir=runs/with_others"]
    assert fsdp_shard("evaluate", *given, *common, cwd=tmp_path).status == 0
    given = ["checkpoint=copy", "stride=4", "run_dir=runs/with_stride"]
    assert fsdp_shard("evaluate", *given, *common, cwd=tmp_path).status == 0

    report = _report(tmp_path / "runs")
    assert (report.problems, report.num_completed) == ([], 4)
    assert [(one.prompt, len(one.rows)) for one in report.samples] == [("a run", 2)]
    assert len(next(chart for chart in report.charts if chart.key == "loss").curves[0].points) == 2
    (step,) = _table(report, "checkpoints").rows
    assert [cell.value for cell in step[1:4]] == [2, "sharded", 2]
    assert _table(report, "evaluations").columns[-2:] == ("digest of data", "digest of weights")
    two, with_others, with_stride = _table(report, "evaluations").rows
    assert two[1].value == "one, step 2", "by the digest of the weights"
    assert with_others[1].value == "one, step 2, another config, tokenizer=model"
    assert [row[2].value for row in (two, with_others, with_stride)] == [None, None, "stride=4"]
    assert _imports_torch(tmp_path, "runs") == "False"


def _imports_torch(directory: Path, runs: str) -> str:
    code = (
        "import sys\nfrom fsdp_shard.evaluation import ReportFiles, report_runs\n"
        f"report_runs([{runs!r}], ReportFiles(html='a.html'))\nprint('torch' in sys.modules)"
    )
    done = run([sys.executable, "-c", code], directory)
    return done.out.splitlines()[-1]


def test_it_imports_no_torch(tmp_path: Path) -> None:
    _run(tmp_path / "a")
    assert _imports_torch(tmp_path, "a") == "False"


_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium")
def test_a_browser_runs_the_page_without_a_complaint(tmp_path: Path) -> None:
    """What the policy of the page refuses, and what its script raises, is on the browser's console."""
    paths = [_run(tmp_path / "a", prompt=_ATTACK), _run(tmp_path / "b", lr="0.1")]
    report_runs([str(path) for path in paths], ReportFiles(html=str(tmp_path / "page.html")))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    done = run([str(_CHROMIUM), *options, f"--user-data-dir={tmp_path}/p", "--dump-dom", "page.html"], tmp_path)
    assert "CONSOLE" not in done.err
    assert done.out.count("<table") == to_html(_report(*paths)).count("<table")

    broken = (tmp_path / "page.html").read_text().replace("</main>", '<img src="http://127.0.0.1:9/x"></main>')
    (tmp_path / "broken.html").write_text(broken)
    done = run([str(_CHROMIUM), *options, f"--user-data-dir={tmp_path}/p", "--dump-dom", "broken.html"], tmp_path)
    assert "CONSOLE" in done.err, "a request is refused, and that is seen"


def test_curves_are_laid_out() -> None:
    assert thin_out([(x, float(x)) for x in range(1, 9)], 4) == [(2, 1.5), (4, 3.5), (6, 5.5), (8, 7.5)]
    assert nice_ticks(3.2, 7.9) == [3, 4, 5, 6, 7, 8]
    assert len({style_of(at) for at in range(32)}) == 32
