"""Tensor names: wrapper prefixes, matching with a model, tied weights."""
