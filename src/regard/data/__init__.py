"""Training data: reading text (`corpora`), the cache of its tokens (`token_cache`), and batches (`packing`).

The built-in corpora are in `builtin`. Nothing is imported here, so that reading text does not import torch.
"""
