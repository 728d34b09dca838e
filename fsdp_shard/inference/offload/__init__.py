"""Weights that stay in their files: memory maps, and reading blocks ahead of their use."""
