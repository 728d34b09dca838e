"""Names of tensors: prefixes of wrappers, matching with a model, tied weights."""
