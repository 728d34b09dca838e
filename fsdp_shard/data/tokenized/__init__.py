"""The cache of tokenized text."""
