"""LoRA and QLoRA adapters."""
