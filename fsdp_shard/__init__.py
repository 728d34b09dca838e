"""fsdp-shard: fine-tune Hugging Face models under FSDP, keep their checkpoints, run inference from them."""
