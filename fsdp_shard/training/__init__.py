"""Training a sharded model: the loop, optimizers, losses, LoRA, logging, and the checkpoints of a run.

Before any rank starts:
    finetune_checks   checks settings, machine, data and model; `model_identity` and `sample_length` belong to it
On each rank, in the order of `recipes/finetune.py`:
    run_setup         the stages around the loop, a function each, on top of `model_origin` and `load_model`
    loop              the steps: `batch_loader` loads samples, objectives/ and loss/ compute losses, optim/ updates
    held_out/         evaluations between steps
    checkpoints/      saves steps, and resumes from them with `trainer_state`, the progress of the run
    logging/          progress, metrics, trackers, plots
Parts of a model:
    peft/             LoRA and QLoRA
    neftune           noise on embeddings
Without `finetune`:
    module_weights    loads and writes the weights of any module; checkpoints/ has `Checkpointer`
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
