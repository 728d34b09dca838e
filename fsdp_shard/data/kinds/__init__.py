"""What a row can be: one file a kind, each turns rows into tokens and says which of them are predicted."""
