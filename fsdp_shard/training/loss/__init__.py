"""Loss computation: the cross-entropy in chunks of the vocabulary projection, log-probabilities, fused kernels.

A run minimizes an objective: a file in `training/objectives`, or a user's `loss=module:function`
(`custom_functions.py`).
"""
