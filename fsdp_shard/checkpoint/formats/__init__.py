"""One file a format: how it is recognized, read and, where we write it, planned. `registry` lists them."""
