"""The real training step of one rank, traced on tensors without memory."""
