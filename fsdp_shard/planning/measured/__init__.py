"""A plan compared with what its run measured."""
