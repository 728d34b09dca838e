"""What would go wrong in a run of `finetune`, found before it begins: looks at things, and leaves none behind."""
