"""From tokenized examples to samples: windows, packing, padding, mixtures; and micro-batches of them."""
