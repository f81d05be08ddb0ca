"""A trace: a recorded forward pass of a model over one input and its output, from which pictures and pages are made."""

from regard.interpret.trace.record import record
from regard.interpret.trace.trace import FORMAT, VERSION, Trace, request_key

__all__ = ["FORMAT", "VERSION", "Trace", "record", "request_key"]
