"""`fsdp-shard report`: compares runs in the terminal and as CSV, Markdown and an HTML page. Imports no torch."""
