"""A trace: what was recorded of one run of a model over one input, for every picture and page to be made from."""

from regard.inside.trace.carrier import FORMAT, VERSION, Trace, request_key
from regard.inside.trace.record import record

__all__ = ["FORMAT", "VERSION", "Trace", "record", "request_key"]
