"""Ids of the special tokens, the first of every vocabulary. They have no spelling, so that no text is parsed as one."""

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # for display only, never parsed
