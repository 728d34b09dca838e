"""The optimizer step and the loop around it, over any model that keeps the `ShardedModel` protocol."""
