"""What a step costs: FLOPs, bytes between ranks, memory traffic and checkpoints."""
