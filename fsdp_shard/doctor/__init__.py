"""What would go wrong in a run of `finetune`, found before it begins. Leaves tokenised text in its cache, no more."""
