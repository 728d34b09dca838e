"""What one micro-batch keeps in memory: a tape of events, recorded on fake tensors."""
