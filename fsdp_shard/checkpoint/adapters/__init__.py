"""peft adapters: checks of their files, and merging them into a base model."""
