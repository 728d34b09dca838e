"""Settings that do not exist, have no such value or are missing: each is named with what is near."""

from __future__ import annotations

import traceback

import pytest

from fsdp_shard.config import COMMANDS, EvaluateConfig, FinetuneConfig, names_elsewhere
from fsdp_shard.config.compose import compose_jobs
from fsdp_shard.config.reference import groups_of, settings_of
from fsdp_shard.errors import ConfigError
from tests.config.composed import refusal


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("adapter.rank=8", "adapter.rank needs adapter=lora; add that, or remove adapter.rank."),
        ("optim.momentum=0.5", "optim.momentum needs optim=muon or optim=sgd; add that"),
        ("optim=sgd optim.fused=true", "optim.fused needs optim=adamw; add that"),
        ("train.lr=1", "train.lr is not a setting of finetune (here it is optim.lr)"),
        ("train.sequence_length=1", "(did you mean data.sequence_length?)"),
        (
            "--learning_rate 1e-4",
            "Unrecognized arguments: --learning_rate (here it is optim.lr); settings have the form",
        ),
        ("--train.steps=5", "Unrecognized arguments: --train.steps=5 (did you mean train.steps=VALUE?)"),
        ("run_dir=", "run_dir is empty; give a directory"),
        ("train.stepz=3", "train.stepz is not a setting of finetune (did you mean train.steps?)"),
        ("trian.steps=3", "(did you mean train.steps?)"),
        ("steps=3", "(did you mean train.steps?)"),
        ("max_grad_norm=3", "(did you mean train.max_grad_norm?)"),
        ("+train.stepz=3", "train.stepz is not a setting of finetune (did you mean train.steps?)"),
        ("++nothing_like_it=3", "nothing_like_it is not a setting of finetune."),
        ("shards=fsdp1", "shards is not a setting of finetune (did you mean shard?)"),
        (
            "shard=fsdp3",
            "shard=fsdp3: there is no such option; shard has fsdp2, fsdp1, ddp, float32, low_memory (did you mean fsdp",
        ),
        ("train=null", "train=null: there is no such option; train has default"),
        ("experiment=nothing", "experiment=nothing: there is no such option; experiment has billions_gpu, "),
        ("train.steps=abc", "train.steps=abc is not a whole number."),
        ("train.steps=1.5", "train.steps=1.5 is not a whole number."),
        ("optim.lr=fast", "optim.lr=fast is not a number."),
        ("debug=maybe", "debug=maybe is not true or false."),
        ("train.steps=0", "train.steps=0 is out of range: it must be at least 1."),
        ("optim.lr=0", "optim.lr=0.0 is out of range: it must be more than 0.0."),
        (
            "shard.activation_checkpointing=some",
            "checkpointing=some is not true, false, none, all",
        ),
        ("shard.activation_checkpointing=0", "activation_checkpointing=0 is not true, false"),
        ("shard.reshard_after_forward=1", "reshard_after_forward=1 is not true, false or a number of ranks from 2 on"),
        (
            "shard.reshard_after_forward=maybe",
            "shard.reshard_after_forward=maybe is not true or false or a whole number",
        ),
        ("shard=fsdp1 shard.reshard_after_forward=2", "use shard=fsdp2 for a number of ranks"),
        ("shard=fsdp1 shard.prefetch_forward=2", "shard=fsdp1 gathers at most one unit ahead"),
        ("shard.prefetch_backward=0", "shard=fsdp2 gathers at least one unit ahead in the backward pass"),
        ("shard.prefetch_backward=2 shard.reshard_after_forward=false", "has no effect with shard.reshard_after"),
        ("shard.blocks=[A] shard.min_params=10", "two ways to choose the units"),
        ("shard.norms_in_float32=true shard.param_dtype=float32", "shard.norms_in_float32=true has no effect"),
        ("shard=ddp shard.replicas=2", "shard.replicas=2 has no effect with shard=ddp"),
        ("shard=ddp shard.cpu_offload=true", "shard.cpu_offload=true has no effect with shard=ddp"),
        ("shard.param_dtype=bf16", "shard.param_dtype=bf16 is not one of float32, bfloat16"),
        ("train.global_batch_size=7 train.micro_batch_size=2", "train.global_batch_size=7 is not divisible"),
        ("launch.nodes=2", "launch.nodes=2 needs launch.rendezvous=host:port"),
        ("launch.rendezvous=a:1", "launch.rendezvous=a:1 has no effect with launch.nodes=1"),
        ("launch.rendezvous=here", "launch.rendezvous=here is not host:port"),
        ("train.steps", "train.steps is not of the form name=value, such as train.steps=VALUE"),
        ("shard.blocks=[a", "shard.blocks=[a cannot be parsed"),
        ("-m model.path=a,b", """model.path=a,b is one text. Quote each of its values, such as 'model.path="a","b"'"""),
        ("train.warmup_steps.x=1", "train.warmup_steps is 0, not a mapping that has x"),
        ("data=a.txt", "data is a section of settings and has no value itself; did you mean data.path=a.txt?"),
        ("train.warmup_steps=null", "train.warmup_steps=null: this setting needs a value"),
        ("train.steps=100 train.epochs=3", "train.steps=100 and train.epochs=3 both say how long to train; give one"),
        ("experiment=small_cpu train.epochs=3", "such as train.steps=null."),
        ("train.epochs=many", "train.epochs=many is not a number."),
        (
            "train.epochs=3 data.path=??? data.mixture={a:{path:a.txt}}",
            "train.epochs=3 cannot be combined with data.mixture, because each source of a mixture has epochs of its "
            "own; set train.steps instead.",
        ),
        ("~train.steps", "train.steps"),
        ("~optim", "~optim would leave finetune without optim, which it needs"),
        ("optim.lr=inf", "optim.lr=inf is out of range: it must be finite."),
        ("launch.timeout_seconds=inf", "launch.timeout_seconds=inf is out of range: it must be at most 2592000.0."),
        ("--config-name=evaluate", "evaluate.yaml is a config of evaluate, not of finetune."),
        ("--foo", "Unrecognized arguments: --foo"),
        ("--cfg nothing", "Argument --cfg/-c: invalid choice: 'nothing'"),
        ("--config-dir nowhere", "--config-dir nowhere: there is no such directory."),
        (
            "hydra/launcher=joblib -m",
            "hydra/launcher=joblib: plugins of Hydra are not supported, and the runs of -m follow",
        ),
        ("hydra.run.dir=x", "hydra.run.dir=x has no effect: Hydra only composes the settings"),
        ("hydra.sweep.dir=x -m train.steps=1,2", "run_dir=DIR is the directory of a run, and that of a sweep."),
        ("++hydra.job.chdir=true", "++hydra.job.chdir=true has no effect"),
        ("--package=foo", "--package=foo has no effect"),
        ("optim=sgd optim.momentum=0 optim.nesterov=true", "optim.nesterov=true needs momentum, but optim.momentum=0"),
        ("hydra/sweeper=optuna optim=sgd,adamw -m", "hydra/sweeper=optuna: plugins of Hydra are not supported, and"),
        (
            "-m optim=adamw,sgdd",
            "optim=sgdd: there is no such option; optim has adamw, adamw8bit, adafactor, muon, sgd (",
        ),
        ("-m optim=sgd,adamw shard=fsdp1,fsdp3", "shard=fsdp3: there is no such option; shard has "),
    ],
)
def test_what_is_wrong_is_named(argument: str, said: str) -> None:
    assert said in refusal("finetune", *argument.split())


@pytest.mark.parametrize(
    ("command", "name", "here"),
    [
        ("finetune", "learning_rate", "optim.lr"),
        ("finetune", "num_train_epochs", "train.epochs"),
        ("finetune", "per_device_train_batch_size", "train.micro_batch_size"),
        ("finetune", "batch_size", "train.micro_batch_size (per rank; train.global_batch_size counts all samples of a"),
        ("finetune", "eval_strategy", "train.eval_every (a number of steps)"),
        ("finetune", "save_strategy", "checkpoint.every (a number of steps)"),
        ("finetune", "warmup_ratio", "train.warmup_steps (a number of steps)"),
        ("finetune", "early_stopping_threshold", "train.min_delta"),
        ("finetune", "resume_from_checkpoint", "resume (auto by default: repeat the command with the same run_dir)"),
        ("finetune", "gradient_accumulation_steps", "train.global_batch_size (train.micro_batch_size x ranks x accum"),
        ("finetune", "max_seq_length", "data.sequence_length"),
        ("finetune", "output_dir", "run_dir"),
        ("finetune", "lora_r", "adapter=lora adapter.rank"),
        ("finetune", "bf16", "shard.param_dtype=bfloat16"),
        ("finetune", "use_liger_kernel", "model.kernels=liger"),
        ("finetune", "fsdp_config.transformer_layer_cls_to_wrap", "shard.blocks"),
        ("finetune", "load_best_model_at_end", "checkpoint.save_best"),
        ("generate", "model_name_or_path", "checkpoint"),
        ("generate", "torch_dtype", "dispatch.dtype"),
        ("convert", "output_dir", "target"),
        ("convert", "checkpoint", "source"),
        ("plan", "max_length", "data.sequence_length"),
    ],
)
def test_names_of_other_libraries_are_answered(command: str, name: str, here: str) -> None:
    assert f"{name} is not a setting of {command} (here it is {here}" in refusal(command, f"{name}=1")


@pytest.mark.parametrize(
    ("command", "argument", "words"),
    [
        (
            "finetune",
            "tensor_parallel=2",
            "of generate, not of finetune; remove it (or did you mean shard.tensor_par",
        ),
        ("convert", "checkpoint.max_shard_size=1GB", "of finetune, not of convert; remove it (or did you mean max_"),
        ("evaluate", "train.steps=3", "train.steps is a setting of finetune, not of evaluate; remove it."),
        ("evaluate", "model.dtype=float32", "is not a setting of evaluate (here it is dispatch.dtype)"),
    ],
)
def test_settings_of_another_command_are_named_as_such(command: str, argument: str, words: str) -> None:
    assert words in refusal(command, argument)


def test_what_has_no_equivalent_is_not_taken_for_something_else() -> None:
    assert "label_smoothing_factor is not a setting of finetune (the cross-entropy has no" in refusal(
        "finetune", "label_smoothing_factor=0.1"
    )
    assert "dataset.train_on_input is not a setting of finetune (data.kind=instruction and chat" in refusal(
        "finetune", "dataset.train_on_input=true"
    )
    assert "cross-entropy" not in refusal("generate", "label_smoothing_factor=0.1")


def test_what_other_libraries_have_is_said_only_where_it_exists() -> None:
    assert "here it is" not in refusal("generate", "num_train_epochs=1")
    known = {
        name for schema in COMMANDS.values() for name in (*groups_of(schema), *(s.name for s in settings_of(schema)))
    }
    here = [name.partition(" (")[0].split() for name in names_elsewhere._NAMES]
    said = {part.partition("=")[0] for parts in here for part in parts}
    assert said <= known, "a name that was changed"


def test_held_out_data_alone_are_enough_to_evaluate_on() -> None:
    (job,) = compose_jobs(EvaluateConfig, ["checkpoint=a", "data.eval_path=held.txt"], "evaluate")
    assert (job.config.data.path, job.config.data.eval_path) == ("", "held.txt")
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        compose_jobs(COMMANDS["evaluate"], ["checkpoint=a"], "evaluate")
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        compose_jobs(FinetuneConfig, ["model.path=a", "data.eval_path=held.txt"], "finetune")


def test_settings_that_must_be_given_are_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match=r"data\.path and model\.path are not set\. Add data\.path=VALUE model"):
        compose_jobs(FinetuneConfig, [], "fsdp-shard finetune")


def test_settings_that_must_be_given_are_explained_by_the_first_sentence_of_their_help() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_jobs(FinetuneConfig, ["model.path=m"], "fsdp-shard finetune")
    assert str(caught.value).endswith(
        "data.path: The data to train on or evaluate: a file, a directory, a pattern such as data/*.jsonl, or a "
        "dataset on the hub."
    )


def test_callers_from_python_see_no_traceback_of_hydra() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_jobs(FinetuneConfig, ["train.stepz=1"], "fsdp-shard finetune")
    assert "site-packages" not in "".join(traceback.format_exception(caught.value))
