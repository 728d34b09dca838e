"""torch DCP directories: `.metadata` and the `.distcp` files that it names. torch is not imported."""

from fsdp_shard.checkpoint.dcp_layout import plan_dcp as plan  # noqa: F401

NAME = "dcp"
