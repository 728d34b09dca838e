"""Set-ups that work, of many kinds: the dry run has nothing to say against any of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from tests.doctor.setups import Setup
from tests.support.runs import Ended, Started
from tests.support.sampled import sampled
from tests.support.tiny import byte_tokenizer, llama

HEALTHY: list[Callable[[Setup], None]] = []
_CHAT = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endfor %}"


def healthy(make: Callable[[Setup], None]) -> Callable[[Setup], None]:
    """Add a set-up to the list."""
    HEALTHY.append(make)
    return make


def _use_model(setup: Setup, config: PretrainedConfig, name: str) -> None:
    """Put a random model of another class in the place of the Llama; the tokenizer stays."""
    (setup.model / "model.safetensors").unlink()
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(setup.model)


def _answers(number: int) -> dict[str, str]:
    return {"instruction": f"Count to {number}.", "output": f"One, two, three, {number}."}


@healthy
def text_on_one_rank(setup: Setup) -> None:
    pass


@healthy
def two_ranks_and_several_files_of_weights(setup: Setup) -> None:
    (setup.model / "model.safetensors").unlink()
    llama(tied=False).save_pretrained(setup.model, max_shard_size="40kB")
    setup.settings["launch.ranks"] = "2"


@healthy
def weights_in_bfloat16(setup: Setup) -> None:
    llama().bfloat16().save_pretrained(setup.model)
    setup.settings["model.dtype"] = "bfloat16"


@healthy
def gpt2_with_a_table_of_positions(setup: Setup) -> None:
    config = transformers.GPT2Config(vocab_size=257, n_positions=64, n_embd=24, n_head=2, n_layer=2)
    _use_model(setup, config, "GPT2LMHeadModel")


@healthy
def a_mixture_of_experts(setup: Setup) -> None:
    config = transformers.MixtralConfig(
        vocab_size=257, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=128,
    )  # fmt: skip
    if "bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("doctor warns of bfloat16 on this CPU, and torch's fake tensors multiply experts in no other dtype")
    _use_model(setup, config, "MixtralForCausalLM")
    setup.settings |= {"launch.ranks": "2", "shard": "fsdp2"}


@healthy
def a_state_space_model(setup: Setup) -> None:
    config = transformers.MambaConfig(vocab_size=257, hidden_size=24, num_hidden_layers=2, state_size=4)
    _use_model(setup, config, "MambaForCausalLM")


@healthy
def an_encoder_decoder_with_pairs(setup: Setup) -> None:
    config = transformers.AutoConfig.for_model(
        "t5", vocab_size=257, d_model=24, d_kv=12, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=256,
    )  # fmt: skip
    _use_model(setup, config, "T5ForConditionalGeneration")
    byte_tokenizer(ends=True).save_pretrained(setup.model)
    setup.write_rows([{"source": f"number {number}", "target": f"the number {number}"} for number in range(40)])
    setup.settings |= {"model.task": "seq2seq", "data.kind": "pairs"}


@healthy
def a_new_head_for_classes(setup: Setup) -> None:
    setup.write_rows([{"text": f"number {number}", "label": ["odd", "even"][number % 2]} for number in range(40)])
    setup.settings |= {"model.task": "sequence_classification", "model.labels": "[even,odd]"}


@healthy
def conversations(setup: Setup) -> None:
    (setup.model / "chat_template.jinja").write_text(_CHAT)
    asked = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me, of course."}]
    setup.write_rows([{"messages": asked}] * 40)
    setup.settings["data.kind"] = "chat"


@healthy
def packed_instructions(setup: Setup) -> None:
    setup.write_rows([_answers(number) for number in range(80)])
    setup.settings |= {"data.kind": "instruction", "data.packing": "true", "data.sequence_length": "128"}


@healthy
def a_few_long_rows_among_many(setup: Setup) -> None:
    long = [{"instruction": "Count.", "output": "One, two. " * 20}] * 8
    setup.write_rows([*(_answers(number) for number in range(60)), *long])
    setup.settings |= {"data.kind": "instruction", "data.sequence_length": "128"}


@healthy
def preferences(setup: Setup) -> None:
    pairs = [{"prompt": f"Is {number} odd?", "chosen": "Yes.", "rejected": "No."} for number in range(40)]
    setup.write_rows(pairs)
    setup.settings |= {"objective": "dpo", "data.kind": "preference"}


@healthy
def an_adapter(setup: Setup) -> None:
    setup.settings |= {"adapter": "lora", "launch.ranks": "2"}


@healthy
def an_adapter_on_a_quantized_base(setup: Setup) -> None:
    setup.settings |= {"adapter": "lora", "adapter.quantize": "nf4"}


@healthy
def a_stream(setup: Setup) -> None:
    setup.settings |= {"data.streaming": "true", "data.sample_by": "paragraph"}
    del setup.settings["data.cache_dir"]


@healthy
def a_mixture_of_sources_with_held_out_data(setup: Setup) -> None:
    setup.write_rows([{"text": f"row {number} has a few words of text"} for number in range(200)])
    sources = f"{{prose: {{path: {setup.data}, weight: 2}}, rows: {{path: {setup.settings.pop('data.path')}}}}}"
    setup.settings |= {"data.mixture": sources, "data.eval_fraction": "0.1", "train.eval_every": "2"}


@healthy
def epochs_and_held_out_text(setup: Setup) -> None:
    other = setup.root / "held_out.txt"
    other.write_text(setup.data.read_text()[::-1][:4000])
    setup.settings |= {
        "data.eval_path": str(other), "train.eval_every": "10", "train.steps": "null", "train.epochs": "1",
        "checkpoint.every": "50", "checkpoint.keep_last": "2",
    }  # fmt: skip


@healthy
def another_wrapper_with_replicas(setup: Setup) -> None:
    setup.settings |= {"shard": "fsdp1", "shard.param_dtype": "float32", "launch.ranks": "2", "shard.replicas": "2"}


@healthy
def sequences_divided_over_two_ranks(setup: Setup) -> None:
    setup.settings |= {"shard.context_parallel": "2", "launch.ranks": "2"}


@healthy
def an_average_of_weights_and_gathered_checkpoints(setup: Setup) -> None:
    setup.settings |= {"train.ema_decay": "0.99", "checkpoint.layout": "gathered", "checkpoint.every": "2"}


@healthy
def a_run_that_is_resumed(setup: Setup) -> None:
    setup.finish_a_run()
    setup.settings["train.steps"] = "8"


@healthy
def an_adapter_that_is_resumed(setup: Setup) -> None:
    setup.settings["adapter"] = "lora"
    setup.finish_a_run()
    setup.settings["train.steps"] = "8"


@healthy
def the_weights_of_another_run(setup: Setup) -> None:
    run = setup.finish_a_run()
    setup.settings |= {"model.path": str(run), "run_dir": str(setup.root / "second")}


@healthy
def usual_variables_of_a_cluster(setup: Setup) -> None:
    cache = setup.root / "hf"
    variables = {"HF_HOME": str(cache), "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN", "TMPDIR": str(setup.root)}
    variables |= {"WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "lo", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}
    for name, value in variables.items():
        setup.monkeypatch.setenv(name, value)
    setup.settings["launch.ranks"] = "2"


@pytest.mark.long
@pytest.mark.parametrize("make", sampled(HEALTHY, 3, lambda make: make.__name__))
def test_nothing_is_said_against_it(make: Callable[[Setup], None], setup: Setup) -> None:
    make(setup)
    _is_healthy(setup.doctor())


@pytest.mark.long
@pytest.mark.parametrize("starter", ["torchrun", "srun"])
def test_ranks_that_others_started(starter: str, setup: Setup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    of_rank = {
        "torchrun": lambda rank: {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
        "srun": lambda rank: {
            "SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": rank,
            "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
        },
    }[starter]  # fmt: skip
    started = []
    for rank in ("0", "1"):
        for name, value in {**of_rank(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            setup.monkeypatch.setenv(name, value)
        given = [f"{name}={value}" for name, value in setup.settings.items()]
        started.append(Started("doctor", setup.root / "run", *given))
    first, second = (each.wait() for each in started)
    _is_healthy(first)
    assert "2 ranks (cpu) met" in first.out
    assert second.status == 0, second.err


def test_there_are_twenty_set_ups_and_more() -> None:
    assert len(HEALTHY) + 2 >= 20


def _is_healthy(ended: Ended) -> None:
    assert ended.status == 0, ended.out + ended.err
    lines = ended.out.partition("\n\n")[0].splitlines()
    assert {line.split()[1] for line in lines} == {"ok"}, ended.out
    assert ended.out.endswith("\nNo problem found.\n")
