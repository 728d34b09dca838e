"""A model put on the devices there are, block by block, straight from a checkpoint, and text from it."""
