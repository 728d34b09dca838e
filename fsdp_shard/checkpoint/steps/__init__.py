"""The steps of a run on disk: their files, manifest and retention."""
