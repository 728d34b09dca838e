"""The cost of a step: FLOPs, communication, memory traffic and checkpoints."""
