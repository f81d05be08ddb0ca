"""Layers and losses: norms, embeddings, positions, Transformer blocks, recurrent cells, cross-entropy."""
