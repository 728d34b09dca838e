"""Checkpoints away from this machine: steps of a run on a remote store, and models on the Hugging Face hub.

Through fsspec:
    store, upload, download     the steps of a run; `same_run` compares the store with the run directory
Through huggingface_hub:
    hub_push                    one commit with the files that `hub_files` selects, by `hub_requests`; deletes the
                                `stale_hub_files` of earlier pushes
"""
