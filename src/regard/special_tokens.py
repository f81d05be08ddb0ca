"""The special ids that every vocabulary begins with. None has a spelling: text can never be mistaken for one."""

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<fill>", "<s>", "</s>", "<unk>")  # how special ids are shown; never how they are read
