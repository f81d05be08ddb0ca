"""Text to tokens and back: byte-level BPE, characters, or words."""

from regard.special_tokens import BOS, EOS, PAD, UNK
from regard.text.encode import encode_side, encode_stream, split_at_word
from regard.text.tokenizers import Tokenizer, train

__all__ = ["BOS", "EOS", "PAD", "UNK", "Tokenizer", "encode_side", "encode_stream", "split_at_word", "train"]
