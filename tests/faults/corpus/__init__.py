"""Damaged and hostile files, a file for each format or subject; each has `CASES`, and all of them are run."""
