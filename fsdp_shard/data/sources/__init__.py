"""Reads rows from files and from hub datasets."""
