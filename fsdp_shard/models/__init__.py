"""Building models and tokenizers from their configs, their no-split blocks, their quantized layers.

    loading           config, tokenizer, and the model on the meta device
    model_directory   downloads a model, and checks its files
    blocks            no-split blocks, from which sharding, dispatch and plans follow
    context_length    the longest sequence of a model
    packing_check, shared_prompts   whether an architecture keeps documents, or answers with one prompt, apart
    quantized_linear  linear layers in 8 or 4 bits
Files of a model are hostile until read:
    named_files and offline refuse what would open files or ask servers; `trials` limits time and memory
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
