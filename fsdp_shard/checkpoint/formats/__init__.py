"""One module per checkpoint format. `registry` lists them and defines their interface."""
