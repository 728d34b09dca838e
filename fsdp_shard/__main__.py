"""`python -m fsdp_shard` is `fsdp-shard`."""

from fsdp_shard.cli import main

if __name__ == "__main__":
    main()
