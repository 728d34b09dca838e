"""What a run looks at between steps: the loss on held-out samples, and completions of a few prompts."""
