"""A trace: what was recorded of one run of a model over one input, for every picture and page to be made from."""

from regard.interpret.trace.record import record
from regard.interpret.trace.trace import FORMAT, VERSION, Trace, request_key

__all__ = ["FORMAT", "VERSION", "Trace", "record", "request_key"]
