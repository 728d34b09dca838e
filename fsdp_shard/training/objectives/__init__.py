"""What a run trains for: supervised fine-tuning, preferences, rewards. A file for each, with its settings."""
