"""The layers that models are built from: norms, feed-forward layers, residual connections, Transformer blocks."""
