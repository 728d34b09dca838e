"""Maps names of settings in transformers, peft, TRL, accelerate, torchtune and axolotl to the names used here."""

import re
from collections.abc import Collection

# Name here -> names elsewhere. For a name with several entries, the first one that the command supports is used.
_NAMES = {
    "adapter=lora": "lora lora_config peft use_lora use_peft",
    "adapter=lora adapter.alpha": "lora_alpha",
    "adapter=lora adapter.dropout": "lora_dropout",
    "adapter=lora adapter.quantize=int8": "load_in_8bit",
    "adapter=lora adapter.quantize=nf4": "load_in_4bit",
    "adapter=lora adapter.rank": "lora_r lora_rank r",
    "adapter=lora adapter.target_modules": "lora_target_modules target_modules",
    "checkpoint.every (a number of steps)": "save_steps save_strategy save_every",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.optimizer=false": "save_only_model",
    "checkpoint.save_best": "load_best_model_at_end",
    "data.eval_fraction": "val_set_size validation_split_percentage",
    "data.eval_path": "eval_dataset eval_file validation_file",
    "data.path": "dataset datasets dataset_name dataset_path data_path data_files train_dataset train_file",
    "data.sequence_length": "block_size cutoff_len max_length max_seq_len max_seq_length sequence_len seq_length",
    "data.label_column": "label_column_name label_name",
    "data.source_column": "prompt_column",
    "data.target_column": "summary_column completion_column",
    "data.text_column": "dataset_text_field text_field text_column_name",
    "data.workers": "dataloader_num_workers num_workers preprocessing_num_workers",
    "generation.max_new_tokens": "max_tokens max_length",
    "scoring.max_new_tokens": "max_tokens generation_max_length max_target_length val_max_target_length",
    "scoring.metrics": "metric metrics metric_name compute_metrics",
    "launch.device": "use_cpu no_cuda device",
    "launch.nodes": "nnodes num_nodes num_machines",
    "launch.ranks": "nproc_per_node gpus num_gpus num_processes world_size ngpu",
    "model.path": "model model_id model_name model_name_or_path model_path base_model pretrained_model_name_or_path",
    "checkpoint": "model model.path model_id model_name model_name_or_path model_path base_model",
    "source": "model model.path model_id model_name model_name_or_path model_path checkpoint input input_dir",
    "target": "output output_dir output_path",
    "model.attention": "attn_implementation flash_attention use_flash_attention_2",
    "model.dtype": "torch_dtype dtype",
    "model.kernels=liger": "use_liger use_liger_kernel",
    "dispatch.dtype": "torch_dtype dtype",
    "dispatch.quantize": "load_in_8bit load_in_4bit quantization quantization_config",
    "optim": "optimizer optim_type",
    "optim.betas=[0.9,0.999]": "adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon",
    "optim.lr": "learning_rate lr",
    "resume (auto by default: repeat the command with the same run_dir)": "resume_from_checkpoint",
    "run_dir": "output_dir logging_dir output_path",
    "shard": "fsdp fsdp_config sharding_strategy strategy",
    "shard.activation_checkpointing": "gradient_checkpointing",
    "shard.blocks": "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap",
    "shard.compile": "torch_compile compile",
    "shard.param_dtype=bfloat16": "bf16 fp16 mixed_precision",
    "train.deterministic": "full_determinism",
    "train.epochs": "num_train_epochs num_epochs epochs",
    "train.eval_every (a number of steps)": "eval_steps eval_strategy evaluation_strategy",
    "train.global_batch_size (train.micro_batch_size x ranks x accumulation steps)": "gradient_accumulation_steps",
    "train.log_every": "logging_steps",
    "train.max_grad_norm": "gradient_clipping gradient_clip_val clip_grad_norm",
    "train.micro_batch_size (per rank; train.global_batch_size counts all samples of a step)": (
        "batch_size train_batch_size"
    ),
    "train.micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size per_device_eval_batch_size",
    "train.min_delta": "early_stopping_threshold",
    "train.patience": "early_stopping_patience",
    "train.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "train.steps": "max_steps num_steps",
    "train.tracker_project": "wandb_project",
    "train.tf32": "allow_tf32",
    "train.trackers": "report_to",
    "train.warmup_steps (a number of steps)": "num_warmup_steps warmup_ratio",
}
# Why a command that trains has no such setting -> names elsewhere that are close to settings of another meaning.
_NONE = {
    "the cross-entropy has no label smoothing": "label_smoothing_factor",
    "data.kind=instruction and chat train on answers only": "train_on_input train_on_inputs",
}


def known_elsewhere(name: str, known: Collection[str]) -> str:
    """Return ` (here it is X)` for another library's name of a setting, if the command has X; else ` (why)` or ""."""
    name = name.lstrip("-").replace("-", "_")
    if "train.steps" in known and (why := next((why for why, names in _NONE.items() if name in names.split()), None)):
        return f" ({why})"
    for here, names in _NAMES.items():
        if name in names.split() and re.findall(r"[\w.]+", here)[0] in known:
            return f" (here it is {here})"
    return ""
