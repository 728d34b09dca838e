"""What a run trains for: supervised fine-tuning, preferences, rewards; a file each, with settings and formula."""
