"""Fine-tune a model under FSDP: load, shard, train, evaluate, save. `fsdp-shard cp finetune` makes a copy to edit.

Where to make changes (every rank runs all of this file):

- the loss: `run.functions.loss = f`, where `f(output, batch)` returns a sum and a count; `batch["labels"]` are already
  shifted, and -100 does not count. `run.functions.metrics` adds more figures.
- samples at each evaluation: `run.functions.samples = f`, where `f(model)` returns prompts and completions.
- frozen weights: `unfilled.module.model.embed_tokens.requires_grad_(False)`, before sharding.
- the optimizer: any torch optimizer over `loaded.model.module.parameters()`; or `build_optimizer` with your own
  `OptimConfig`, which also separates the parameters with and without weight decay. Steps keep the tensors of
  `optimizer.state[param]`; an optimizer with other state is refused.
- the learning rate: `train.schedule` sets it before each step, so a scheduler of torch is refused. For a schedule of
  your own, give `train.schedule=constant`, and set `group["initial_lr"]` of each group by `run.state.step`, before the
  loop and after each step.
- the sample order: `data.train`; subclass `ShuffledDataset` from `fsdp_shard.data`, override `index_of`, and replace
  `data.train` right after `open_data`.
- after a step, or before a save: lines in the loop. `log.note` shows a line once; `context.is_main` is true on one
  rank. `saver.save` reads the weights until the next optimizer step.
- your own settings: use a dataclass that extends `FinetuneConfig` instead.
"""

import fsdp_shard as fs


@fs.recipe(fs.FinetuneConfig, check=fs.check_finetune, writes_config=True)
def main(config: fs.FinetuneConfig) -> None:
    """Fine-tune `model` on `data`. Every rank runs this; `check_finetune` runs once before."""
    with fs.start_run(config) as start:
        if start.is_finished:
            return  # start_run has already reported that the run is finished
        context = start.context
        data = fs.open_data(config, start)
        data = fs.add_reference(config, start, data)  # log-probabilities that the objective needs; most need none
        # Built on the meta device, wrapped along no-split blocks, and filled: each rank reads its own shards.
        with fs.build_unfilled(config, start) as unfilled:
            sharded = config.shard.shard(unfilled.module, context)
            loaded = unfilled.load(sharded, config.seed)
        optimizer = fs.build_optimizer(config.optim, loaded.model, context, loaded.adapter)
        run = fs.open_run(config, start, loaded, optimizer, data.train)

        with (
            fs.open_log(config, run, start, loaded, data.notes) as log,
            fs.open_saver(config, run, start, loaded, log) as saver,
        ):
            evaluator = fs.HeldOutEvaluator(run, data.held_out, log)
            evaluator.before_training()
            saver.note_best(run.state)
            for report in fs.train(run):
                log.step(report)
                saver.poll()  # reports a background save once all ranks have finished it
                evaluator.after_step()  # evaluates if due; the step may become the best
                if run.is_over or saver.is_due(run.state, run.config.num_steps):
                    saver.save(run.state)
            saver.finish()
            fs.finish_run(config, run, loaded, log)


if __name__ == "__main__":
    main()
