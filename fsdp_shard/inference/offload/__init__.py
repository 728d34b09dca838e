"""Runs blocks whose weights stay in their files: memory maps, and reading blocks ahead of use."""
