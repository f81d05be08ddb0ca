"""The HTTP server of `regard look`, for this machine only."""
