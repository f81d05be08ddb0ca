"""The HTTP service behind `regard look`: runs on this machine, for this machine."""
