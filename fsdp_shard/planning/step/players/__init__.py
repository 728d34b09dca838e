"""The players: each plays a training step of one rank as one wrapper handles its memory."""
