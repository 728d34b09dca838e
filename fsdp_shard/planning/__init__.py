"""What a run would need, computed from configs alone."""
