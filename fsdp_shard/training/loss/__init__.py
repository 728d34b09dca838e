"""How losses are computed: the cross-entropy in chunks of the vocabulary projection, log-probabilities, fused kernels.

What is minimized is an objective: a new one is a file in `training/objectives`, or a user's `loss=module:function`
(`custom_functions.py`).
"""
