"""`task=perplexity`: which windows or documents are scored, their losses, and the statistics over them."""
