"""Divides each sequence of a batch over neighboring ranks: the tokens of each rank, and attention across ranks."""
