"""The files of torch.save, read and written without torch: containers, pickles by an allow-list, tensors in place."""
