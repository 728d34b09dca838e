"""How blocks keep less for the backward pass than autograd would: selective checkpointing, and offload to the CPU."""
