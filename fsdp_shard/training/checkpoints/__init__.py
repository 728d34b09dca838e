"""Saving the steps of a run, resuming from one, and the lock on its directory.

A save, from the top down:

    Checkpointer.save             your own loop: collects a step of it (`step_parts`)
    FinetuneSaver.save            `finetune`: collects a step of the run (`saver`); is a BackgroundSaver
    BackgroundSaver.save_content  saves one step at a time, in the background if asked; handles failures
    StepPublisher.publish         has the step written, reads it back, deletes older ones, uploads it
    checkpoint.save_step          writes the step with all ranks, commits it, and makes it the latest
    StepStore.commit              on rank 0: the manifest, and the rename that completes the step

Reading back, `Checkpointer.restore` uses `step_reader`, `checkpointer_document` and `state_tree`; `finetune` uses
`resume`.
"""
