"""Evaluates models: perplexity, classification, rewards, generated answers, speed, and lm-evaluation-harness tasks.

    evaluation_run    the stages of an evaluation, with the task chosen by `registry`
    perplexity_task/, scored_rows/, speed_task/, lm_eval   the tasks
    logged_batches    batches on all ranks, recorded so that a killed evaluation continues
    provenance        what result.json says about the figures; `significance` their intervals
Of finished runs:
    report/           compares runs
    model_card/       the model card for the hub
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
