"""From prompts to completions: tokenizing, batching, decoding, chat, the output file."""
