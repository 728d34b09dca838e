"""Makes the model card (README.md) of a checkpoint for the Hugging Face hub from its run. Imports no torch."""
