"""Saving the steps of a run, resuming from one, and the lock on its directory.

A save, from the top down:

    Checkpointer    your own loop: collects a step of it (`step_parts`), and hands it to a StepSaver
    FinetuneSaver   `finetune`: collects a step of the run if one is due; is a StepSaver
    StepSaver       saves one step at a time through `checkpoint.save_step`, in the background if asked
    StepCommitter   makes the step the latest, deletes older ones, uploads it

Reading back, `Checkpointer.restore` uses `stored_step`, `loop_state` and `state_tree`; `finetune` uses `resume`.
"""
