"""What `torch.distributed.checkpoint` writes: directories with `.metadata`, and rank files of safetensors."""
