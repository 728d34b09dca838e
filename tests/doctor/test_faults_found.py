"""Faults of models, data, disks, machines and settings, each made for real: the dry run has to name each of them."""

from __future__ import annotations

import gzip
import os
import resource
import shutil
import socket
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from fsdp_shard.training import LOCK
from tests.doctor.setups import Setup
from tests.support.sampled import sampled
from tests.support.tiny import llama, save_adapter

_CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"


class Fault(NamedTuple):
    """What breaks a set-up, and what doctor must print of it: a line with this mark and all of these words."""

    breaks: Callable[[Setup], None]
    mark: str
    said: tuple[str, ...]


FAULTS: list[Fault] = []


def fault(mark: str, *said: str) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
    """Add a fault to the table."""

    def add(breaks: Callable[[Setup], None]) -> Callable[[Setup], None]:
        FAULTS.append(Fault(breaks, mark, said))
        return breaks

    return add


# The model


@fault("FAIL", "{model}", "no weights")
def a_model_without_weights(setup: Setup) -> None:
    (setup.model / "model.safetensors").unlink()


@fault("FAIL", "model-00002-of-", "{model}")
def a_missing_part_of_the_weights(setup: Setup) -> None:
    (setup.model / "model.safetensors").unlink()
    llama().save_pretrained(setup.model, max_shard_size="40kB")
    next(setup.model.glob("model-00002-of-*")).unlink()


@fault("FAIL", "{model}/model.safetensors", "truncated")
def weights_that_end_too_early(setup: Setup) -> None:
    path = setup.model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5000)


@fault("FAIL", "{model}/model.safetensors", "Git LFS")
def weights_that_are_a_pointer_of_git(setup: Setup) -> None:
    (setup.model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "a" + "\nsize 123456\n"
    )


@fault("FAIL", "{model}/model.safetensors", "HTML")
def weights_that_are_a_page_of_an_error(setup: Setup) -> None:
    (setup.model / "model.safetensors").write_text("<!DOCTYPE html><html><body>404: not found</body></html>")


@fault("FAIL", "{model}", "config.json")
def a_model_without_a_config(setup: Setup) -> None:
    (setup.model / "config.json").unlink()


@fault("FAIL", "{model}/config.json", "JSON")
def a_config_that_ends_too_early(setup: Setup) -> None:
    path = setup.model / "config.json"
    path.write_text(path.read_text()[:100])


@fault("FAIL", "{model}", "shapes that do not fit", "different models")
def a_config_with_other_sizes(setup: Setup) -> None:
    setup.edit_config(intermediate_size=96)


@fault("FAIL", "{model}", "lacks", "another model's")
def a_config_of_another_kind_of_model(setup: Setup) -> None:
    config = GPT2Config(vocab_size=257, n_embd=24, n_head=2, n_layer=2, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(setup.model)


@fault("FAIL", "{model}", "model.layers.2.", "lacks")
def a_config_with_more_layers(setup: Setup) -> None:
    setup.edit_config(num_hidden_layers=3)


@fault("FAIL", "{model}", "predict")
def a_model_for_another_task(setup: Setup) -> None:
    setup.edit_config(architectures=["LlamaForSequenceClassification"])


@fault("FAIL", "{model}", "quantized", "gptq")
def quantized_weights(setup: Setup) -> None:
    path, name = setup.model / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    weight = tensors.pop(f"{name}.weight")
    packed = torch.zeros(len(weight) // 8, 85, dtype=torch.int32)
    save_file(tensors | {f"{name}.qweight": packed, f"{name}.scales": torch.ones(1, 85)}, path, {"format": "pt"})
    setup.edit_config(quantization_config={"quant_method": "gptq", "bits": 4})


@fault("FAIL", "{model}", "tokenizer", "Copy the tokenizer files")
def a_model_without_a_tokenizer(setup: Setup) -> None:
    for path in setup.model.glob("tokenizer*"):
        path.unlink()


@fault("FAIL", "tokenizer", "{model}")
def a_tokenizer_that_ends_too_early(setup: Setup) -> None:
    path = setup.model / "tokenizer.json"
    path.write_text(path.read_text()[:1000])


@fault("FAIL", "vocabulary of 257 tokens", "tokenizer", "{model}")
def a_tokenizer_with_more_tokens_than_the_model(setup: Setup) -> None:
    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    tokenizer.add_tokens(["the"])
    tokenizer.save_pretrained(setup.model)


@fault("FAIL", "org/a-model-that-is-nowhere", "HF_HUB_OFFLINE")
def a_model_of_the_hub_without_a_network(setup: Setup) -> None:
    setup.monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    setup.settings["model.path"] = "org/a-model-that-is-nowhere"


@fault("FAIL", "adapter.target_modules", "no_such_layer")
def an_adapter_for_layers_that_the_model_does_not_have(setup: Setup) -> None:
    setup.settings |= {"adapter": "lora", "adapter.target_modules": "[no_such_layer]"}


@fault("FAIL", "{model}-gone", "adapter", "base")
def an_adapter_whose_base_is_gone(setup: Setup) -> None:
    gone = setup.root / "model-gone"
    shutil.copytree(setup.model, gone)
    setup.settings["model.path"] = str(save_adapter(setup.root / "adapter", gone))
    shutil.rmtree(gone)


# The data


@fault("FAIL", "data.path={root}/none.txt")
def data_that_is_not_there(setup: Setup) -> None:
    setup.settings["data.path"] = str(setup.root / "none.txt")


@fault("FAIL", "{data}", "empty")
def an_empty_file(setup: Setup) -> None:
    setup.data.write_bytes(b"")


@fault("FAIL", "{data}", "UTF-8")
def text_in_another_encoding(setup: Setup) -> None:
    setup.data.write_bytes("Größe über alles, déjà vu. ".encode("utf-16") * 100)


@fault("FAIL", "{root}/rows.jsonl", "column", "content")
def rows_without_the_column(setup: Setup) -> None:
    setup.write_rows([{"content": "a text of some words"}] * 50)


@fault("FAIL", "{root}/rows.jsonl", "301")
def a_row_that_is_not_json_far_behind_the_first(setup: Setup) -> None:
    setup.write_rows([{"text": f"row {number} has a few words of text"} for number in range(400)])
    path = setup.root / "rows.jsonl"
    lines = path.read_text().splitlines()
    lines[300] = lines[300][:20]
    path.write_text("\n".join(lines) + "\n")


@fault("FAIL", "{root}/text.txt.gz")
def a_compressed_file_that_ends_too_early(setup: Setup) -> None:
    path = setup.root / "text.txt.gz"
    content = gzip.compress(setup.data.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    setup.settings["data.path"] = str(path)


@fault("FAIL", "{root}/rows.jsonl", "Git LFS")
def data_that_are_a_pointer_of_git(setup: Setup) -> None:
    path = setup.root / "rows.jsonl"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "a" + "\nsize 123456\n")
    setup.settings["data.path"] = str(path)


@fault("FAIL", "{root}/rows.jsonl", "no column 'messages'", "it has text")
def data_of_another_kind(setup: Setup) -> None:
    setup.write_rows([{"text": "no conversation"}] * 50)
    (setup.model / "chat_template.jinja").write_text(_CHAT)
    setup.settings["data.kind"] = "chat"


@fault("FAIL", "chat template", "{model}", "data.chat_template")
def conversations_without_a_chat_template(setup: Setup) -> None:
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    setup.write_rows([{"messages": messages}] * 50)
    setup.settings["data.kind"] = "chat"


@fault("FAIL", "{root}/rows.jsonl", "nothing to")
def rows_with_nothing_to_learn(setup: Setup) -> None:
    setup.write_rows([{"instruction": "Say nothing.", "output": ""}] * 50)
    setup.settings["data.kind"] = "instruction"


@fault("warn", "of 20 samples", "train.global_batch_size=32")
def fewer_samples_than_a_batch(setup: Setup) -> None:
    setup.write_rows([{"instruction": f"Count to {number}.", "output": "One, two."} for number in range(20)])
    setup.settings |= {"data.kind": "instruction", "train.global_batch_size": "32"}


@fault("warn", "{root}/rows.jsonl", "cut to 64 tokens", "data.sequence_length")
def samples_that_are_nearly_all_cut(setup: Setup) -> None:
    setup.write_rows([{"instruction": f"Count to {number}.", "output": "One, two. " * 20} for number in range(50)])
    setup.settings["data.kind"] = "instruction"


@fault("warn", "{root}/rows.jsonl", "40 of 50 rows", "nothing to learn", "data.sequence_length")
def prompts_that_leave_no_space_for_answers(setup: Setup) -> None:
    long = [{"instruction": "Count and count. " * 20, "output": "One."}] * 40
    setup.write_rows([*long, *({"instruction": f"Count to {number}.", "output": "One."} for number in range(10))])
    setup.settings["data.kind"] = "instruction"


def _answers(setup: Setup, rejected: list[str | None], length: int = 1) -> None:
    setup.write_rows([{"prompt": "Is it?", "chosen": "Yes. " * length, "rejected": answer} for answer in rejected])
    setup.settings |= {"objective": "dpo", "data.kind": "preference"}


@fault("warn", "{root}/rows.jsonl: left out: 2 pairs with an empty answer, which leaves 6 pairs; look at the rows.")
def answers_that_are_null(setup: Setup) -> None:
    _answers(setup, [None, None, *"abcdef"])


@fault("warn", "{root}/rows.jsonl: 8 of 8 pairs are cut to 64 tokens", "data.sequence_length")
def answers_that_are_cut(setup: Setup) -> None:
    _answers(setup, [*"abcdefgh"], length=30)


@fault(
    "warn", "{root}/rows.jsonl: left out: 2 pairs whose answers are equal in the first 64 tokens, which leaves 6 pairs",
    "; set a larger data.sequence_length, or look at the rows.",
)  # fmt: skip
def answers_that_are_equal_where_they_are_cut(setup: Setup) -> None:
    _answers(setup, ["Yes. " * 40, "Yes. " * 41, *"abcdef"], length=30)


@fault("warn", "data.sequence_length=4096", "context of 128")
def samples_longer_than_the_context(setup: Setup) -> None:
    setup.settings["data.sequence_length"] = "4096"


@fault("FAIL", "data.sequence_length=128", "context of 64", "no positions beyond")
def samples_longer_than_a_table_of_positions(setup: Setup) -> None:
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=24, n_head=2, n_layer=1)
    (setup.model / "model.safetensors").unlink()
    GPT2LMHeadModel(config).save_pretrained(setup.model)
    setup.settings["data.sequence_length"] = "128"


@fault("warn", "data.eval_path", "{data}", "data.path")
def held_out_data_that_are_trained(setup: Setup) -> None:
    setup.settings |= {"data.eval_path": str(setup.data), "train.eval_every": "2"}


@fault("warn", "data.eval_path", "{root}/copy.txt", "data.path")
def held_out_data_that_are_a_copy(setup: Setup) -> None:
    shutil.copy(setup.data, setup.root / "copy.txt")
    setup.settings |= {"data.eval_path": str(setup.root / "copy.txt"), "train.eval_every": "2"}


@fault("FAIL", "{root}/file/cache")
def a_cache_that_cannot_be_written(setup: Setup) -> None:
    (setup.root / "file").write_text("")
    setup.settings["data.cache_dir"] = str(setup.root / "file" / "cache")


@fault("FAIL", "{root}/mounted", "No space left", "set data.cache_dir")
def a_cache_on_a_full_disk(setup: Setup) -> None:
    mounted = setup.mount("size=16k")
    setup.settings["data.cache_dir"] = str(mounted)


# The settings


@fault("FAIL", "train.global_batch_size=3", "not divisible")
def a_batch_that_cannot_be_divided(setup: Setup) -> None:
    setup.settings |= {"train.global_batch_size": "3", "launch.ranks": "2"}


@fault("FAIL", "loss=broken_loss:loss", "SyntaxError", "broken_loss.py, line 2")
def a_loss_with_a_syntax_error(setup: Setup) -> None:
    (setup.root / "broken_loss.py").write_text("import torch\ndef loss(outputs, labels:\n    return 0\n")
    setup.monkeypatch.chdir(setup.root)
    setup.settings["loss"] = "broken_loss:loss"


@fault("FAIL", "optim=adamw8bit", "is not installed", "Install it with")
def an_optimizer_of_a_package_that_is_not_installed(setup: Setup) -> None:
    setup.settings["optim"] = "adamw8bit"


@fault("FAIL", "train.trackers", "wandb")
def a_tracker_without_a_key(setup: Setup) -> None:
    setup.settings["train.trackers"] = "[wandb]"


@fault("FAIL", "launch.device=cuda", "no GPU")
def gpus_that_are_not_there(setup: Setup) -> None:
    setup.settings["launch.device"] = "cuda"


# The run directory and its disk


@fault("FAIL", "run_dir=/proc/a-run", "cannot be written")
def a_run_directory_that_cannot_be_made(setup: Setup) -> None:
    setup.settings["run_dir"] = "/proc/a-run"


@fault("FAIL", "run_dir={root}/mounted", "Read-only file system", "another directory")
def a_disk_that_is_mounted_read_only(setup: Setup) -> None:
    setup.settings["run_dir"] = str(setup.mount("ro") / "run")


@fault("FAIL", "{root}/mounted", "No space left")
def a_disk_that_is_full(setup: Setup) -> None:
    setup.settings["run_dir"] = str(setup.mount("size=1m") / "run")


@fault("FAIL", "checkpoints at a time", "free", "checkpoint.keep_last")
def checkpoints_that_do_not_fit(setup: Setup) -> None:
    setup.settings |= {"run_dir": str(setup.mount("size=40m") / "run"), "train.steps": "1000", "checkpoint.every": "1"}


@fault("FAIL", "{root}/mounted", "inodes")
def a_disk_without_inodes(setup: Setup) -> None:
    mounted = setup.mount("size=400m,nr_inodes=8")
    setup.settings |= {"run_dir": str(mounted / "run"), "train.steps": "100", "checkpoint.every": "10"}


@fault("FAIL", "run_dir={root}/run", "in use by another run")
def a_run_directory_in_use(setup: Setup) -> None:
    import fcntl

    (setup.root / "run").mkdir()
    handle = os.open(setup.root / "run" / LOCK, os.O_RDWR | os.O_CREAT)
    setup.undo.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX)


@fault("FAIL", "run_dir={model}", "holds the weights of a model")
def a_run_directory_that_is_a_model(setup: Setup) -> None:
    setup.settings["run_dir"] = str(setup.model)


@fault("FAIL", "manifest.json", "step-")
def a_step_to_resume_from_without_its_manifest(setup: Setup) -> None:
    run = setup.finish_a_run()
    next((run / "checkpoints").glob("step-*/manifest.json")).unlink()
    setup.settings["train.steps"] = "8"


@fault("FAIL", "step-", "bytes")
def a_step_to_resume_from_that_ends_too_early(setup: Setup) -> None:
    run = setup.finish_a_run()
    path = max((run / "checkpoints").glob("step-*/optimizer/*"), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)
    setup.settings["train.steps"] = "8"


@fault("FAIL", "trained with objective=sft", "objective=")
def a_run_with_another_objective(setup: Setup) -> None:
    setup.finish_a_run()
    pairs = [{"prompt": f"Is {number} odd?", "chosen": "Yes.", "rejected": "No."} for number in range(50)]
    setup.write_rows(pairs)
    setup.settings |= {"objective": "dpo", "data.kind": "preference", "train.steps": "8"}


@fault("FAIL", "{root}/nowhere", "does not exist")
def a_run_to_resume_from_that_is_nowhere(setup: Setup) -> None:
    setup.settings["resume"] = str(setup.root / "nowhere")


@fault("FAIL", "step-", "model.path")
def an_adapter_to_resume_on_another_base(setup: Setup) -> None:
    setup.settings["adapter"] = "lora"
    setup.finish_a_run()
    llama(seed=5, layers=3).save_pretrained(setup.model)
    setup.settings["train.steps"] = "8"


# The ranks and their network


@fault("FAIL", "launch.rendezvous=127.0.0.1:", "another program", "Give another port")
def a_port_in_use(setup: Setup) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    setup.undo.callback(server.close)
    setup.settings |= {"launch.nodes": "2", "launch.rendezvous": f"127.0.0.1:{server.getsockname()[1]}"}


@fault("FAIL", "launch.rendezvous=no-such-host.invalid:29400", "resolve")
def a_rendezvous_that_does_not_resolve(setup: Setup) -> None:
    setup.settings |= {"launch.nodes": "2", "launch.rendezvous": "no-such-host.invalid:29400"}


@fault("FAIL", "MASTER_ADDR:MASTER_PORT=no-such-host.invalid", "resolve")
def a_first_rank_that_does_not_resolve(setup: Setup) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29411"}.items():
        setup.monkeypatch.setenv(name, value)
    setup.monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    setup.settings["launch.timeout_seconds"] = "5"


@fault("FAIL", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2")
def a_rank_that_cannot_be(setup: Setup) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    variables |= {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        setup.monkeypatch.setenv(name, value)
    setup.settings["launch.timeout_seconds"] = "5"


@fault("warn", "WORLD_SIZE=8", "MASTER_ADDR", "not set")
def half_of_the_variables_of_torchrun(setup: Setup) -> None:
    setup.monkeypatch.setenv("WORLD_SIZE", "8")
    setup.monkeypatch.setenv("RANK", "0")


@fault("FAIL", "WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=2", "unset WORLD_SIZE")
def variables_of_slurm_that_contradict(setup: Setup) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8", "WORLD_SIZE": "8"}
    for name, value in variables.items():
        setup.monkeypatch.setenv(name, value)
    setup.settings["launch.timeout_seconds"] = "5"


@fault("warn", "SLURM_NTASKS=8", "launch.ranks")
def a_batch_script_of_slurm_without_srun(setup: Setup) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}
    for name, value in variables.items():
        setup.monkeypatch.setenv(name, value)


@fault("FAIL", "GLOO_SOCKET_IFNAME=ib77", "no such interface")
def a_network_interface_that_is_not_there(setup: Setup) -> None:
    setup.monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib77")
    setup.settings["launch.ranks"] = "2"


@fault("warn", "launch.ranks=16", "cores")
def more_ranks_than_cores(setup: Setup) -> None:
    setup.settings |= {"launch.ranks": "16", "train.global_batch_size": "16", "shard.replicas": "16"}


@fault("warn", "OMP_NUM_THREADS=64", "launch.ranks=2")
def more_threads_than_cores(setup: Setup) -> None:
    setup.monkeypatch.setenv("OMP_NUM_THREADS", "64")
    setup.settings["launch.ranks"] = "2"


# The machine and its environment


@fault("FAIL", "memory", "train.micro_batch_size")
def too_little_memory(setup: Setup) -> None:
    setup.settings |= {"train.micro_batch_size": "1000000", "train.global_batch_size": "1000000"}


@fault("warn", "64.0 GiB of addresses", "ulimit -v unlimited")
def a_limit_of_addresses(setup: Setup) -> None:
    setup.limit(resource.RLIMIT_AS, 64 << 30)


@fault("FAIL", "ulimit -f", "checkpoint")
def a_limit_of_the_size_of_files(setup: Setup) -> None:
    setup.limit(resource.RLIMIT_FSIZE, 100_000)


@fault("warn", "ulimit -t", "seconds")
def a_limit_of_time(setup: Setup) -> None:
    setup.limit(resource.RLIMIT_CPU, 3600)


@fault("warn", "TMPDIR={root}/no-temporary", "does not exist")
def a_directory_for_temporary_files_that_is_not_there(setup: Setup) -> None:
    setup.monkeypatch.setenv("TMPDIR", str(setup.root / "no-temporary"))


@fault("warn", "HF_HOME={root}/file", "not a directory")
def a_home_of_hugging_face_that_cannot_be_written(setup: Setup) -> None:
    (setup.root / "file").write_text("")
    setup.monkeypatch.setenv("HF_HOME", str(setup.root / "file"))


@fault("FAIL", "safetensors 0.1.0 is installed", "constraints.txt")
def a_library_that_is_too_old(setup: Setup) -> None:
    directory = setup.root / "site" / "safetensors-0.1.0.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.1.0\n")
    setup.monkeypatch.syspath_prepend(directory.parent)


@fault("warn", "TRANSFORMERS_CACHE", "HF_HOME")
def a_variable_that_is_no_longer_read(setup: Setup) -> None:
    setup.monkeypatch.setenv("TRANSFORMERS_CACHE", "/scratch/models")


@fault("warn", "TORCH_DISTRIBUTED_DEBUG=DETAIL", "slow")
def a_variable_that_checks_every_collective(setup: Setup) -> None:
    setup.monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    setup.settings["launch.ranks"] = "2"


def test_there_are_forty_faults_and_more() -> None:
    assert len(FAULTS) >= 40


@pytest.mark.long
@pytest.mark.parametrize("fault", sampled(FAULTS, 3, lambda fault: fault.breaks.__name__))
def test_a_fault_is_found(fault: Fault, setup: Setup) -> None:
    fault.breaks(setup)
    ended = setup.doctor()
    said = [text.format(root=setup.root, model=setup.model, data=setup.data) for text in fault.said]
    lines = [line for line in ended.out.splitlines() if line.split()[1:2] == [fault.mark]]
    found = [line for line in lines if all(text in line for text in said)]
    assert found, "\n".join([*said, ended.out, ended.err])
    assert ended.status == (1 if fault.mark == "FAIL" else 0), ended.err
    assert "Traceback" not in ended.err
