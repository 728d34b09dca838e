"""Steps on a remote store, through fsspec."""
