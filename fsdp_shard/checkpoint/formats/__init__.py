"""One module per checkpoint format. `registry` lists them and says what such a module has to offer."""
