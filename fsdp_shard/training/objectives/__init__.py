"""The training objectives: supervised fine-tuning, preferences, rewards; a file each, with settings and formula."""
