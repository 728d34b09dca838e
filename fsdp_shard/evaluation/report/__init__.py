"""`fsdp-shard report`: runs side by side, in the terminal and as CSV, Markdown and an HTML page. Imports no torch."""
