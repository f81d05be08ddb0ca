"""Text to tokens and back: byte-level BPE, characters, or words."""

from regard.marks import BEGIN, END, FILL, UNKNOWN
from regard.text.sides import encode_side, encode_stream
from regard.text.tokenizers import Tokenizer, train

__all__ = ["BEGIN", "END", "FILL", "UNKNOWN", "Tokenizer", "encode_side", "encode_stream", "train"]
