"""`task=perplexity`: the scored windows or documents, their losses, and the statistics over them."""
