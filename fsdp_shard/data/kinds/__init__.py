"""One file a kind of row: how it becomes token ids, and which of them are predicted."""
