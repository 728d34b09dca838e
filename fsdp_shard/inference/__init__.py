"""Runs models spread over GPU, CPU and disk, block by block, straight from a checkpoint, and generates text.

From a checkpoint to a model:
    dispatch            opens the checkpoint, plans and loads
    device_map/         which block runs on which device, and which are streamed, by strategy
    offload/            places the blocks; its hooks read streamed blocks before they run, into a ring of buffers
    quantization        int8 and int4 weights
From prompts to text:
    generation/         tokenizes, decodes and writes completions
For evaluations of many batches:
    batch_schedule      the order of batches and streamed blocks
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
