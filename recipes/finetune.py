"""Fine-tune a causal language model under FSDP: build, shard, load, train, evaluate, save."""

from __future__ import annotations

from fsdp_shard.cli import recipe
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import check_data, check_task, data_figures, prepare_on_ranks
from fsdp_shard.distributed import distributed, is_restarted, uses_gpus, world_sizes
from fsdp_shard.models import load_tokenizer
from fsdp_shard.training import (
    RunLog,
    StepProfiler,
    StopSignal,
    build_optimizer,
    check_batch,
    check_continues,
    check_free,
    check_held_out,
    check_kernels,
    check_model,
    check_optimizer,
    check_plots,
    check_trackers,
    data_task,
    describe,
    deterministic_algorithms,
    evaluate_loss,
    find_step,
    is_due,
    is_finished,
    load_sharded,
    model_source,
    open_saver,
    open_trainer,
    public_settings,
    restore_optimizer,
    run_lock,
    side_files,
    stopped,
    train,
    utilization,
    verify_resumed,
)


def check(config: FinetuneConfig) -> None:
    """What can be found wrong before any rank starts."""
    for num_ranks in world_sizes(config.launch):
        config.shard.check_ranks(num_ranks, on_gpu=uses_gpus(config.launch))
        num_micro_batches = check_batch(config.train, config.shard.num_data_ranks(num_ranks))
        config.shard.check_accumulation(num_micro_batches)
    check_kernels(config.model.kernels, config.shard, on_gpu=uses_gpus(config.launch))
    config.optim.check_installed()
    check_task(config.model.task, config.data)
    check_data(config.data, config.model.task)
    check_held_out(config.train, config.data)
    config.adapter.check_installed()
    is_again = check_free(config.run_dir, may_join=config.launch.is_elastic) or is_restarted()
    resumed = find_step(config.resume, config.run_dir, config.checkpoint.remote, is_again=is_again)
    if not is_finished(resumed, config.run_dir, config.train):
        check_optimizer(resumed)
    check_continues(config.adapter, resumed)
    check_model(config.model, config.shard, config.data, config.adapter, model_source(config.model, resumed))
    check_trackers(config.train.trackers)
    if config.train.plot:
        check_plots()


@recipe(FinetuneConfig, check=check)
def main(config: FinetuneConfig) -> None:
    """Fine-tune `model` on `data`, on every rank alike."""
    launch, shard, settings = config.launch, config.shard, config.train
    with (
        deterministic_algorithms(settings.deterministic),
        distributed(
            launch.device,
            shard.replicas,
            launch.timeout_seconds,
            tensor_parallel=shard.tensor_parallel,
            expert_parallel=shard.expert_parallel,
        ) as context,
        run_lock(config.run_dir, context),
        StopSignal() as stop,
    ):
        resumed = context.decide(
            lambda: find_step(config.resume, config.run_dir, config.checkpoint.remote, is_again=is_restarted())
        )
        if context.decide(lambda: is_finished(resumed, config.run_dir, settings)):
            return
        verify_resumed(resumed, config.checkpoint, context)
        source = model_source(config.model, resumed)
        data = prepare_on_ranks(
            config.data,
            lambda: load_tokenizer(source, config.model.trust_remote_code),
            context,
            task=data_task(config.model, source),
            seed=config.seed,
        )
        held_out = data.held_out.head(settings.eval_windows) if data.held_out else None
        loaded = load_sharded(config.model, shard, source, context, config.adapter, config.seed, resumed)
        optimizer = build_optimizer(config.optim, loaded.model, context)
        state = context.decide(lambda: open_trainer(resumed, config.seed, data.train.identity))
        if resumed is not None:
            restore_optimizer(optimizer, loaded, resumed, context)
        beside = context.decide(lambda: side_files(source, config.model.dtype, loaded.adapter))
        mfu = utilization(loaded, shard.param_dtype, config.data.sequence_length, context)
        shown = public_settings(config)
        with (
            RunLog(config.run_dir, settings, context, state, resumed, shown, mfu) as log,
            open_saver(config.run_dir, config.checkpoint, context, loaded, optimizer, beside, log) as saver,
        ):
            log.note([*describe(loaded, config.model, shard, context), *data.notes])
            if held_out and (state.step == 0 or state.owes_evaluation):
                evaluation = evaluate_loss(loaded.model, held_out, settings.micro_batch_size, context)
                if state.owes_evaluation:
                    state.evaluated(evaluation.loss, settings.min_delta)
                    saver.note_best(state)
                log.evaluation(state.step, evaluation, state)
            for report in train(
                loaded.model,
                optimizer,
                data.train,
                settings,
                context,
                state=state,
                peak_lr=config.optim.lr,
                stop=stop,
                sync_every_micro_batch=shard.sync_every_micro_batch,
                around=StepProfiler(settings.profile, config.run_dir, context).around,
            ):
                log.step(report)
                saver.poll()
                is_cut_short = bool(report.stop_signal) and report.step < settings.steps
                state.owes_evaluation = bool(held_out) and is_due(report.step, settings.eval_every, settings.steps)
                if held_out and state.owes_evaluation and not is_cut_short:
                    evaluation = evaluate_loss(loaded.model, held_out, settings.micro_batch_size, context)
                    state.evaluated(evaluation.loss, settings.min_delta)
                    log.evaluation(report.step, evaluation, state)
                ends = bool(report.stop_signal) or state.stops_early(settings.patience)
                if saver.is_due(state, settings.steps) or ends:
                    saver.save(state)
                if is_cut_short:
                    saver.finish()
                    raise stopped(report, config.run_dir, config.resume)
            saver.finish()
            seen = data_figures(data.train, state.num_samples, state.source_tokens)
            log.finish(
                config.model.path, state, {"num_params": loaded.num_params, "load": loaded.figures.row(), **seen}
            )


if __name__ == "__main__":
    main()
