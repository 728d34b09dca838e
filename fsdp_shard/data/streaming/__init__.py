"""Samples of rows that are read and tokenized while training."""
