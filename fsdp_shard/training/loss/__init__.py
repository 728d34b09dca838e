"""Loss functions: cross-entropy, computed in chunks of the vocabulary projection, and fused kernels."""
