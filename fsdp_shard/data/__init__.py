"""Turns rows of text into batches of token ids, in one global order determined by the seed.

For training:
    pipeline          the settings `data.*` in, training and held-out samples out; `validate` checks them beforehand
    sources/          rows of files and hub datasets
    kinds/            token ids of a row, and which of them are predicted, a file per kind of row
    tokenized/        the cache of token ids
    samples/          windows, packing, padding, mixtures, and batches of them; `sample_order` permutes them
    streaming/        the same for rows that are tokenized during training
For evaluations, the rows one by one, in the form on which a model trains:
    documents, questions, labeled_texts, compared_answers
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
