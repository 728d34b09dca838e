"""Evaluations between training steps: the loss on held-out samples, and completions of a few prompts."""
