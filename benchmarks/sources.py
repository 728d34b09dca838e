"""Makes what the benchmarks convert, by the writers of others: NAME TARGET ARGUMENTS, each in a process of its own.

A random bf16 Llama by `save_pretrained`; the same tensors as DCP and as per-rank safetensors, written by real ranks.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

# Bytes up to which -> (hidden, intermediate, vocabulary): of TinyLlama's proportions.
_WIDTHS = ((1e8, 256, 688, 4000), (6e8, 1024, 2816, 16_000), (float("inf"), 2048, 5632, 32_000))


def llama(target: str, gigabytes: str) -> None:
    """A random Llama in bf16 of about this size, in one file."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    wanted = float(gigabytes) * 1e9
    _, hidden, intermediate, vocabulary = next(row for row in _WIDTHS if wanted <= row[0])
    layer_bytes = 2 * (4 * hidden * hidden + 3 * hidden * intermediate)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        num_hidden_layers=max(round((wanted - 4 * hidden * vocabulary) / layer_bytes), 1),
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target, max_shard_size="1000GB")
    tokenizer(target)


def tokenizer(target: str) -> None:
    """A tokenizer whose tokens are the bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_bytes = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=by_bytes).save_pretrained(target)


def many_tensors(target: str, count: str) -> None:
    """One file with a great many tensors, of which only the header counts."""
    import torch
    from safetensors.torch import save_file

    names = (f"model.layers.{number // 10}.mlp.experts.{number % 10}.weight" for number in range(int(count)))
    Path(target).mkdir()
    save_file({name: torch.zeros(2, 2) for name in names}, f"{target}/model.safetensors")


def trainable(target: str, hidden: str, layers: str, vocabulary: str) -> None:
    """A random Llama in fp32, with a tokenizer of its own and TARGET/text.txt: prose that comes with Python."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = min(int(vocabulary), 8000)
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=int(hidden),
        intermediate_size=int(hidden) * 8 // 3,
        vocab_size=int(vocabulary),
        num_hidden_layers=int(layers),
        num_attention_heads=max(int(hidden) // 64, 2),
        tie_word_embeddings=True,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(target)
    (Path(target) / "text.txt").write_text(text, encoding="utf-8")


def torch_ranks(target: str, source: str, ranks: str) -> None:
    """TARGET/dcp and TARGET/safetensors: the tensors of SOURCE, cut on dim 0 as FSDP2 does, by torch's writers."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.ranks import on_ranks

    on_ranks(int(ranks), _save, target, source, timeout_seconds=1800)


def _save(context: Any, target: str, source: str) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch import Size
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (context.world_size,))
    state = {}
    with safe_open(f"{source}/model.safetensors", framework="pt") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            part = file.get_slice(name)
            shape = Size(part.get_shape())
            rows = -(-shape[0] // context.world_size)
            start = min(rows * context.rank, shape[0])
            local = part[start : min(start + rows, shape[0])].clone()
            strides = (1,) if len(shape) == 1 else (shape[1], 1)
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)
        dcp.save({"model": state}, checkpoint_id=f"{target}/dcp")
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{target}/safetensors", save_distributed=True))


MAKERS = {maker.__name__: maker for maker in (llama, many_tensors, torch_ranks, trainable)}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](*sys.argv[2:])
