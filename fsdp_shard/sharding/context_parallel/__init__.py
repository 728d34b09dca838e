"""Each sequence of a batch divided over neighboring ranks: which tokens a rank has, and attention across ranks."""
