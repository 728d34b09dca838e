"""Sharding a model over ranks along its no-split blocks. Knows neither checkpoints nor data."""
