"""Sentence pairs: reading them (`sources`), keeping their tokens (`store`), and packing them into batches (`packing`).

The built-in corpora are in `builtin`. Nothing is imported here, so that reading text needs no tensor library.
"""
