"""What one micro-batch keeps in memory: events, recorded on fake tensors."""
