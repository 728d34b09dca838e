"""Memory events of one micro-batch, recorded on fake tensors."""
