"""Helpers: balanced partitions, text for messages, optional packages, secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_shard.errors import ConfigError, one_line
from fsdp_shard.utils import (
    balanced_partition,
    chosen_options,
    environment,
    first_line,
    flatten,
    format_count,
    format_number,
    format_size,
    format_table,
    in_yaml,
    install_command,
    missing_file_system,
    printable,
    redact,
    redact_setting,
    require_package,
)


def test_partitions_have_each_item_once_and_about_the_same_size() -> None:
    sizes = {"a": 8, "b": 5, "c": 4, "d": 4, "e": 1}
    assert balanced_partition(sizes, 2, sizes.__getitem__) == [["a", "d"], ["b", "c", "e"]]
    parts = balanced_partition(sizes, 3, sizes.__getitem__)
    assert sorted(name for names in parts for name in names) == sorted(sizes)
    assert balanced_partition(["a"], 3, sizes.__getitem__) == [["a"], [], []]
    sizes = {"a": 7, "b": 5, "c": 5, "d": 1, "e": 0}
    parts = balanced_partition(sorted(sizes), 2, sizes.__getitem__)
    assert [sum(sizes[name] for name in names) for names in parts] == [8, 10]


def test_sizes_have_one_unit_and_three_digits() -> None:
    sizes = (0, 512, 999, 1000, 3 * 2**20, 2**30 // 8, 1000 * 2**20, 11_406_393_344, 5 * 2**50)
    expected = ["0 B", "512 B", "999 B", "0.98 KiB", "3.00 MiB", "128 MiB", "0.98 GiB", "10.6 GiB", "5120 TiB"]
    assert [format_size(size) for size in sizes] == expected


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("  \n one")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_counts() -> None:
    assert [format_count(count, "rank") for count in (0, 1, 2048)] == ["0 ranks", "1 rank", "2,048 ranks"]
    assert [format_count(count, "epoch") for count in (0.33333, 1.0, 12.0)] == ["0.333 epochs", "1 epoch", "12 epochs"]


def test_numbers_with_three_digits() -> None:
    numbers = (0, 576, 999, 1000, 36_600, 999_499, 999_500, 135_400_000, 2_850_000_000, 10**13)
    assert [format_number(number) for number in numbers] == [
        "0", "576", "999", "1 K", "36.6 K", "999 K", "1 M", "135 M", "2.85 B", "1e+04 B",
    ]  # fmt: skip


def test_a_missing_package_names_its_extra() -> None:
    require_package("json", "lora", "adapter=lora")
    match = r"adapter=lora needs no-package, which is not installed.*\[lora\]', or set adapter=none\."
    with pytest.raises(ConfigError, match=match):
        require_package("no_package", "lora", "adapter=lora", "set adapter=none")


def test_an_extra_is_installed_as_the_package_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(environment.__file__).parents[2]
    monkeypatch.chdir(root)
    assert install_command("lora").endswith("pip install -e '.[lora]'")
    monkeypatch.chdir(tmp_path)
    assert install_command("lora").endswith(f"pip install -e '{root}[lora]'")
    (tmp_path / "fsdp_shard" / "_shipped").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()  # as some packages leave one in site-packages
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "fsdp_shard" / "utils" / "environment.py"))
    assert install_command("lora").endswith("pip install 'fsdp-shard[lora]'")


def test_an_extra_is_installed_where_this_python_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python, elsewhere = tmp_path / "own" / "bin" / "python", tmp_path / "other" / "bin"
    for folder in (python.parent, elsewhere):
        folder.mkdir(parents=True)
        (folder / "pip").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(python.parent))
    assert install_command("lora").startswith("pip install ")
    monkeypatch.setenv("PATH", str(elsewhere))
    assert install_command("lora").startswith(f"{python} -m pip install ")
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert install_command("lora").startswith(f"uv pip install --python {python} ")


def test_a_missing_file_system_names_its_package() -> None:
    error = ImportError("Please install gcsfs to access Google Storage")
    assert str(missing_file_system("data.path=gs://b/x", "gs://b/x", error)) == (
        "data.path=gs://b/x needs a package that is not installed. Please install gcsfs to access Google Storage."
    )
    said = str(missing_file_system("s3://b/x", "s3://b/x", ImportError("Install s3fs to access S3")))
    assert said == f"s3://b/x needs a package that is not installed. Install it with {install_command('remote')}."


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    assert redact("https://me:word@host/x hf_abcdefgh 0123456789") == "https://***@host/x hf_*** ***"
    assert redact_setting("data.hub_token", "abc") == "***"
    assert redact_setting("data.tokenizer", "https://me:word@host") == "https://***@host"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "s3://u:p@h/x?X-Amz-Credential=a/b%2F&X-Amz-Expires=5&X-Amz-Signature=9a",
            "s3://***@h/x?X-Amz-Credential=***&X-Amz-Expires=5&X-Amz-Signature=***",
        ),
        ("az://c/x.jsonl?sv=1&sig=ab%2Bc==", "az://c/x.jsonl?sv=1&sig=***"),
        ("(gs://b/x?access_token=ya29.a-b). Give", "(gs://b/x?access_token=***). Give"),
        (
            "['zip://a::https://x/y?v=3&api_key=ab', 's3://b?v=2']",
            "['zip://a::https://x/y?v=3&api_key=***', 's3://b?v=2']",
        ),
        (r"{\"at\": \"http://x?key=ab\"}", r"{\"at\": \"http://x?key=***\"}"),
        ("http://x?page=2&part=1#sign is?token=1", "http://x?page=2&part=1#sign is?token=1"),
    ],
)
def test_what_signs_a_request_is_redacted(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


def test_names_from_files_neither_move_the_cursor_nor_fill_the_screen() -> None:
    assert one_line("a\x1b[2Jb\nc\rd\u202ee\x9bf\ud800") == r"a\x1b[2Jb\nc\rd\u202ee\x9bf\ud800"
    for text in ("layers.0.weight", "модель/权重 名", "שלום עולם", "می‌خواهم", "👩‍💻", "a\u00a0b\u3000c"):
        assert one_line(text) == text
    long = one_line(f"tensor {'x' * 10_000_000} is missing; {'a b ' * 3_000_000} give another one.")
    assert len(long) < 20_000
    assert (long.startswith("tensor xxx"), long.endswith("give another one.")) == (True, True)
    assert printable("a\x1b\nb") == "a\\x1b\nb"
    assert format_table([["name"], ["a\nb"]]) == ["name", "a\\nb"]


def test_columns_are_aligned_to_the_right_by_their_numbers_or_as_told() -> None:
    rows = [["name", "bytes", "of"], ["a", "7", "x"], ["long", "125", ""]]
    assert format_table(rows) == ["name  bytes  of", "a         7  x", "long    125"]
    rows = [["", "-", "b"], ["first layer"], ["x", "0.5", "12"]]
    assert format_table(rows, right=(1,)) == ["               -  b", "first layer", "x            0.5  12"]
    assert format_table([], right=(1,)) == []


def test_nested_settings_have_dotted_names_and_values_as_in_yaml() -> None:
    values = {"optim": {"lr": 0.1, "of": {"x": None}, "none": {}}, "seed": 1}
    assert list(flatten(values)) == [("optim.lr", 0.1), ("optim.of.x", None), ("seed", 1)]
    assert [name for name, _ in flatten(values, "/")] == ["optim/lr", "optim/of/x", "seed"]
    assert [in_yaml(value) for value in (None, True, 0.5, "None")] == ["null", "true", "0.5", "None"]
    assert chosen_options(["a_schema", {"shard": "fsdp2"}, "_self_", {"optim": "adamw"}]) == {
        "shard": "fsdp2",
        "optim": "adamw",
    }


def test_what_the_encoding_of_the_terminal_lacks_is_escaped() -> None:
    program = "from fsdp_shard.utils import make_output_printable; make_output_printable(); print('caf\u00e9')"
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"caf\\xe9\n", 0)
