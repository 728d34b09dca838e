"""One file per kind of row, which defines its token ids and which of them are predicted."""
