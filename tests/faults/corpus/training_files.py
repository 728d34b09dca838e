"""What a run goes on from: trainer.json, optimizer, pointers, metrics and settings; sealed again where a seal is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from tests.checkpoint.files import edit_header
from tests.faults.corpus import edits
from tests.faults.corpus.bases import damaged
from tests.faults.corpus.case import Case
from tests.faults.corpus.edits import DEEP, DIGITS, Damage

_STEP = "checkpoints/step-00000001"
_TRAINER = "trainer.json"
_OPTIMIZER = "optimizer/shard-00000-of-00001.safetensors"


def _in_step(*damages: Damage, is_sealed: bool = True) -> Damage:
    """Damages of the step, whose manifest then has the digests of what they leave."""
    damage = edits.sealed(*damages) if is_sealed else edits.both(*damages)
    return lambda root: damage(root / _STEP)


def _trainer(**values: Any) -> Damage:
    return _in_step(edits.fields(_TRAINER, **values))


def _optimizer(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return _in_step(lambda step: edit_header(step / _OPTIMIZER, change))


def _tensors(document: dict[str, Any]) -> list[str]:
    return [name for name in document if name != "__metadata__"]


_REFUSED: dict[str, Damage] = {
    "trainer: cut short": _in_step(edits.cut(_TRAINER, 50)),
    "trainer: empty": _in_step(edits.content(_TRAINER, b"")),
    "trainer: a list": _in_step(edits.content(_TRAINER, "[1]")),
    "trainer: no UTF-8": _in_step(edits.content(_TRAINER, b"\xff")),
    "trainer: deep nesting": _in_step(edits.literal(_TRAINER, "place", DEEP)),
    "trainer: a step of 5,000 digits": _in_step(edits.literal(_TRAINER, "step", DIGITS)),
    "trainer: a seed of 5,000 digits": _in_step(edits.literal(_TRAINER, "seed", DIGITS)),
    "trainer: gone": _in_step(edits.gone(_TRAINER), is_sealed=False),
    "trainer: a FIFO": _in_step(edits.fifo(_TRAINER), is_sealed=False),
    "trainer: a directory": _in_step(edits.directory(_TRAINER), is_sealed=False),
    "trainer: changed without a seal": _in_step(edits.fields(_TRAINER, step=2), is_sealed=False),
    "trainer: version 9": _trainer(format_version=9),
    "trainer: a step that is a text": _trainer(step="1"),
    "trainer: a negative step": _trainer(step=-1),
    "trainer: a step of true": _trainer(step=True),
    "trainer: another seed": _trainer(seed=7),
    "trainer: other data": _trainer(data="x"),
    "trainer: data a number": _trainer(data=7),
    "trainer: samples a text": _trainer(num_samples="8"),
    "trainer: a negative number of samples": _trainer(num_samples=-8),
    "trainer: best_loss a text": _trainer(best_loss="low"),
    "trainer: a place that is a list": _trainer(place=[1]),
    "trainer: sources a list": _trainer(source_tokens=[1]),
    "trainer: an unknown key": _trainer(magic=1),
    "trainer: a key missing": _in_step(edits.without(_TRAINER, "num_stale")),
    "optimizer: gone": _in_step(edits.gone(_OPTIMIZER), is_sealed=False),
    "optimizer: no directory": lambda root: shutil.rmtree(root / _STEP / "optimizer"),
    "optimizer: empty": _in_step(edits.content(_OPTIMIZER, b""), is_sealed=False),
    "optimizer: another dtype": _optimizer(lambda document: document[_tensors(document)[0]].update(dtype="I32")),
    "optimizer: a tensor of another name": _optimizer(
        lambda document: document.update({"x": document.pop(_tensors(document)[0])})
    ),
    "weights: gone": _in_step(edits.gone("shard-00000-of-00001.safetensors"), is_sealed=False),
    "manifest: gone": _in_step(edits.gone("manifest.json"), is_sealed=False),
    "manifest: another step": _in_step(
        lambda step: edits.seal(step, lambda manifest: manifest.update(step=5)), is_sealed=False
    ),
    "config: gone": _in_step(edits.gone("config.json"), is_sealed=False),
    "base model: a list": _in_step(edits.content("base_model.json", "[1]")),
    "base model: cut short": _in_step(edits.content("base_model.json", '{"finger')),
    "base model: another": _in_step(edits.fields("base_model.json", fingerprint="0" * 32)),
    "run_config: a list": _in_step(edits.content("run_config.yaml", "- 1\n")),
    "run_config: no YAML": _in_step(edits.content("run_config.yaml", "a: [1\n b: }")),
    "run_config: an object of Python": _in_step(
        edits.content("run_config.yaml", "a: !!python/object/apply:os.mkdir [canary]\n")
    ),
    "run_config: an interpolation": _in_step(edits.content("run_config.yaml", "seed: ${oc.env:HOME}\n")),
    "run_config: deep nesting": _in_step(edits.content("run_config.yaml", "a: " + "[" * 5000 + "]" * 5000)),
    "run_config: names of names": _in_step(
        edits.content("run_config.yaml", "a: &a [1,1]\n" + "".join(f"b{n}: &b{n} [*a,*a]\n" for n in range(3)))
    ),
}
_EITHER: dict[str, Damage] = {
    "latest: nothing": edits.content("checkpoints/latest", ""),
    "latest: up and out": edits.content("checkpoints/latest", "../../secret"),
    "latest: another step": edits.content("checkpoints/latest", "step-00000099"),
    "latest: binary": edits.content("checkpoints/latest", b"\xff\x00"),
    "latest: long": edits.content("checkpoints/latest", "step-" + "1" * 5000),
    "latest: a directory": edits.directory("checkpoints/latest"),
    "latest: a FIFO": edits.fifo("checkpoints/latest"),
    "best: nothing": edits.content("checkpoints/best", "step-00000077"),
    "a step of 5,000 digits": lambda root: (root / "checkpoints" / ("step-" + "1" * 200)).mkdir(),
    "a step that is a file": edits.content("checkpoints/step-00000002", "x"),
    "a step that is empty": lambda root: (root / "checkpoints/step-00000002").mkdir(),
    "metrics: cut short": edits.content("metrics.jsonl", '{"step": 1, "lo'),
    "metrics: binary": edits.content("metrics.jsonl", b"\xff\xfe\x00"),
    "metrics: a list": edits.content("metrics.jsonl", "[1]\n"),
    "metrics: texts": edits.content("metrics.jsonl", '{"step": "one", "loss": "low"}\n'),
    "metrics: a step of 5,000 digits": edits.content("metrics.jsonl", f'{{"step": {DIGITS}}}\n'),
    "metrics: deep nesting": edits.content("metrics.jsonl", DEEP + "\n"),
    "metrics: gone": edits.gone("metrics.jsonl"),
    "metrics: a directory": edits.directory("metrics.jsonl"),
    "evaluations: binary": edits.content("evaluations.jsonl", b"\xff\xfe\x00"),
    "evaluations: a list": edits.content("evaluations.jsonl", "[1]\n"),
    "config.yaml: no YAML": edits.content("config.yaml", "a: [1\n b: }"),
    "config.yaml: binary": edits.content("config.yaml", b"\xff\xfe\x00"),
    "config.yaml: a list": edits.content("config.yaml", "- 1\n"),
    "config.yaml: an object of Python": edits.content("config.yaml", "a: !!python/object/apply:os.mkdir [canary]\n"),
    "config.yaml: gone": edits.gone("config.yaml"),
    "result.json: cut short": edits.content("result.json", '{"status'),
    "result.json: a list": edits.content("result.json", "[1]"),
    "trainer: a best loss that is not a number": _in_step(edits.literal(_TRAINER, "best_loss", "NaN")),
    "trainer: a number of samples of 2^70": _trainer(num_samples=2**70),
    "trainer: a best step of the future": _trainer(best_step=10**9),
    "trainer: samples of an epoch 0": _trainer(samples_per_epoch=0),
    "trainer: another step": _trainer(step=5),
    "trainer: a step of 2^70": _trainer(step=2**70),
    "base model: gone": _in_step(edits.gone("base_model.json"), is_sealed=False),
    "base model: a path of a number": _in_step(edits.fields("base_model.json", path=7)),
    "chat template: another": _in_step(edits.content("chat_template.jinja", "{% if")),
}

CASES = [
    *(Case(name, damaged("run", damage), damages="training") for name, damage in _REFUSED.items()),
    *(Case(name, damaged("run", damage), expect="any", damages="training") for name, damage in _EITHER.items()),
]
