"""What would lead to a request or to native code is seen, and refused with a reason; the corpus has the cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fsdp_shard import convert, load_dispatched
from fsdp_shard.errors import CheckpointError, ModelError
from tests.faults.corpus.elsewhere import ADDRESSES
from tests.support.commands import ROOT, run
from tests.support.tiny import save_adapter

_STAND_INS = Path(__file__).parent / "harness" / "stand_ins"


@pytest.mark.long
def test_a_kernel_and_a_request_would_be_seen(tiny_model: Path, tmp_path: Path) -> None:
    """By what watches the corpus: the stand-in for the package `kernels`, and sockets that refuse."""
    script = f"""
import contextlib, urllib.request
from pathlib import Path
from transformers import AutoModelForCausalLM
from tests.faults.harness.child import Watch
place = Path({str(tmp_path)!r}) / "case"
place.mkdir()
watch = Watch(place, place / "model")
with contextlib.suppress(ValueError):
    AutoModelForCausalLM.from_pretrained({str(tiny_model)!r}, attn_implementation="kernels-community/flash-attn2")
with contextlib.suppress(OSError):
    urllib.request.urlopen("http://127.0.0.1:9/")
print([line for line in watch.found(writes_inside=False) if line.startswith(("kernels", "getaddrinfo"))])
"""
    done = run([sys.executable, "-c", script], tmp_path, PYTHONPATH=f"{_STAND_INS}:{ROOT}", HF_HUB_OFFLINE="0")
    assert done.status == 0, done.err[-2000:]
    assert "kernels: " in done.out
    assert "getaddrinfo: " in done.out


def test_an_adapter_does_not_name_an_address_as_its_base(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_model)
    document = json.loads((adapter / "adapter_config.json").read_text())
    for address in ADDRESSES:
        (adapter / "adapter_config.json").write_text(json.dumps(document | {"base_model_name_or_path": address}))
        for read in (load_dispatched, lambda path: convert(path, tmp_path / "target")):
            with pytest.raises(CheckpointError, match=r"is an adapter of .*base=") as raised:
                read(adapter)
            assert ("an address" in str(raised.value)) == ("://" in address)
    load_dispatched(adapter, base=tiny_model)


@pytest.mark.long
def test_a_model_whose_code_downloads_kernels_is_refused_where_they_can_be(tmp_path: Path) -> None:
    script = (
        "from transformers import RwkvConfig; from fsdp_shard.models import build_on_meta\n"
        "build_on_meta(RwkvConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9))"
    )
    environment = {"PYTHONPATH": f"{_STAND_INS}:{ROOT}", "KERNEL_CALLS": str(tmp_path / "calls")}
    with_kernels = run([sys.executable, "-c", script], tmp_path, **environment)
    assert ModelError.__name__ in with_kernels.err
    assert "trust_remote_code=true" in with_kernels.err
    assert run([sys.executable, "-c", script], tmp_path).status == 0
