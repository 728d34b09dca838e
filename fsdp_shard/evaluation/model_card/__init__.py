"""The model card (README.md) of a checkpoint for the Hugging Face hub, made from its run. Imports no torch."""
