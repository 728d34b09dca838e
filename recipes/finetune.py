"""Fine-tune a model under FSDP: load, shard, train, evaluate, save. `fsdp-shard cp finetune` makes a copy to edit.

Where to change what; every rank runs all of it:

- the loss: `run.functions.loss = f`, where `f(output, batch)` returns a sum and a count; `batch["labels"]` are shifted
  already, and -100 does not count. `run.functions.metrics` takes more figures.
- what is shown at each evaluation: `run.functions.samples = f`, where `f(model)` returns prompts and completions.
- frozen weights: `unfilled.module.model.embed_tokens.requires_grad_(False)`, before they are sharded.
- the optimizer: any of torch's, of `loaded.model.module.parameters()`; or `build_optimizer` with an `OptimConfig` of
  your own, which also divides the parameters into those with and without weight decay.
- the order of the samples: `data.train`, a `Dataset`; extend `Shuffled` and its `index_of`.
- after a step, or before a save: lines in the loop. `log.note` shows a line once; `run_on_main(context, f)` does
  something once. `saver.save` still reads the weights until the next step of the optimizer.
- a setting of your own: a dataclass that extends `FinetuneConfig`, in the place of it.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from fsdp_shard.cli import recipe
from fsdp_shard.config import FinetuneConfig
from fsdp_shard.data import prepare_on_ranks
from fsdp_shard.distributed import run_on_main
from fsdp_shard.models import load_tokenizer
from fsdp_shard.training import (
    HeldOutEvaluator,
    StepProfiler,
    TrainingRun,
    build_optimizer,
    build_unfilled,
    check_finetune,
    collect_model_files,
    data_figures,
    data_task,
    describe_model,
    find_loss,
    find_start,
    interrupted,
    open_log,
    open_saver,
    restore_state,
    run_files,
    sample_completions,
    start_run,
    train,
)
from fsdp_shard.utils import keep_freed_memory


@recipe(FinetuneConfig, check=check_finetune, writes_config=True)
def main(config: FinetuneConfig) -> None:
    """Fine-tune `model` on `data`. Every rank runs this; `check_finetune` runs once before."""
    with start_run(config) as (context, stop):
        if context.device.type == "cpu":
            keep_freed_memory()  # a tenth of a step's time
        start = find_start(config, context)
        if start is None:
            return  # the run is already finished, as it says

        source, task, trust = start.source, data_task(config.model, start.source), config.model.trust_remote_code
        open_tokenizer = partial(load_tokenizer, source.tokenizer, trust)
        data = prepare_on_ranks(config.data, open_tokenizer, context, task=task, seed=config.seed)
        # On the meta device; then wrapped along its no-split blocks; then each rank reads its own shards.
        with build_unfilled(config.model, source, config.shard, config.adapter, start.step, context) as unfilled:
            sharded = config.shard.shard(unfilled.module, context)
            loaded = unfilled.load(sharded, config.seed)
        optimizer = build_optimizer(config.optim, loaded.model, context)
        state = restore_state(start, config.seed, data.train, loaded, optimizer, context)
        files = run_on_main(context, lambda: collect_model_files(source, config.model, config.data, loaded.adapter))
        files |= run_files(config, loaded)

        run = TrainingRun(loaded.model, optimizer, data.train, config.train, context, state, stop)
        run.sync_every_micro_batch = config.shard.sync_every_micro_batch
        run.functions.loss = find_loss(config.loss)
        run.functions.samples = sample_completions(config, open_tokenizer, context)
        run.profile = StepProfiler(config.train.profile, config.run_dir, context).profile
        with (
            open_log(config, run, start, loaded) as log,
            open_saver(config.run_dir, config.checkpoint, context, loaded, optimizer, files, log) as saver,
        ):
            log.note([*describe_model(loaded, config.model, config.shard, context), *data.notes])
            evaluator = HeldOutEvaluator(run, data.held_out, log)
            evaluator.before_training()
            saver.note_best(state)
            for report in train(run):
                log.step(report)
                saver.poll()  # ends a save in the background
                evaluator.after_step()  # says whether this step is the best
                if run.is_over or saver.is_due(state, run.config.num_steps):
                    saver.save(state)
            saver.finish()
            if run.interrupted_by:
                raise interrupted(run, config.run_dir, config.resume)
            figures = data_figures(data.train, state.num_samples, state.source_tokens)
            log.finish(config.model.path, {"num_params": loaded.num_params, "load": asdict(loaded.figures), **figures})


if __name__ == "__main__":
    main()
