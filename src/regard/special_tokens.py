"""Ids of the special tokens that every vocabulary begins with. None has a spelling, so no text is mistaken for one."""

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<fill>", "<s>", "</s>", "<unk>")  # for display only: never parsed
