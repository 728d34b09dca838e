"""Reading rows from files and from hub data sets."""
