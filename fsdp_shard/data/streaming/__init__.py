"""Samples from rows that are read and tokenized during training."""
