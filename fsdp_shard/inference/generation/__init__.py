"""From prompts to completions: tokenizing, batching, decoding, chat, and the output file."""
