"""One file a format: recognise, read. `registry` lists them."""
