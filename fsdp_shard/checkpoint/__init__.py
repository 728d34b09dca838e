"""Checkpoints as lists of tensors with byte ranges: `index` reads, `layout` plans, `store` keeps the steps of a run."""
