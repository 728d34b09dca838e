"""The formats of `torch.distributed.checkpoint`: directories with `.metadata`, and safetensors rank files."""
