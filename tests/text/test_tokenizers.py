"""Tokenizers: decoding restores the text, and no text is parsed as a special token."""

import base64
import io
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.text import BOS, EOS, PAD, UNK, Tokenizer, encode_side, train
from regard.text.tokenizers import ForeignVocabulary, SentencePieceTokenizer, WordPieceTokenizer, join_tokens

TEXTS = ["the cat sat on the mat", "the dog sat on the cat", "die Katze saß auf der Matte", "größer, größer"]
TAGS = ("<2de>", "<2en>")
BPE = train(TEXTS, "bpe", 300, TAGS)
CHAR = train(TEXTS, "char", 300, TAGS)
WORD = train(TEXTS, "word", 300, TAGS)

awkward = st.sampled_from(
    ["\n", "\r\n", "\x00", "</s>", "<s>", "<2de>", "<unk>", "  ", "🙂", "👩‍👩‍👧", "é", "e\u0301", "\u2028", "the cat"]
)
texts = st.lists(st.one_of(st.text(max_size=8), awkward), max_size=8).map("".join)


@pytest.mark.parametrize("tokenizer", [BPE, CHAR], ids=["bpe", "char"])
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_decoding_restores_every_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(6 <= token < len(tokenizer) for token in ids), "text never becomes a special id or a tag"


@settings(max_examples=50, deadline=None)
@given(st.lists(texts, max_size=5))
def test_a_batch_is_encoded_like_single_texts(many):
    for tokenizer in (BPE, CHAR, WORD):
        assert tokenizer.encode_batch(many) == [tokenizer.encode(text) for text in many]


SIGNS = ["⟨c3⟩⟨af⟩ und ⟨c3⟩⟨af⟩ und", "⟨c3⟩"] * 3  # text that reads like bytes


@pytest.mark.parametrize("tokenizer", [BPE, CHAR, train(SIGNS, "bpe", 400), train(SIGNS, "char", 400)], ids=repr)
@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.one_of(texts, st.sampled_from([*SIGNS, "⟨", "⟩", "c3", "ï"])), max_size=4).map("".join))
def test_tokens_join_to_the_text_even_if_a_character_is_split(tokenizer, text):
    tokens = tokenizer.token_texts(tokenizer.encode(text))
    assert join_tokens(tokens) == text
    if not any("⟨" in token for token in tokens):
        assert "".join(tokens) == text


def test_invalid_bytes_stay_bytes():
    assert join_tokens(["⟨d0⟩", "⟨bc⟩⟨d0⟩", "⟨b8⟩ ⟨f0⟩", "⟨9f⟩", "é⟨80⟩"]) == "ми ⟨f0⟩⟨9f⟩é⟨80⟩"
    assert join_tokens(["⟨ed⟩", "⟨a0⟩", "⟨80⟩"]) == "⟨ed⟩⟨a0⟩⟨80⟩", "half a surrogate pair"
    assert join_tokens(["⟨c3⟩⟨af⟩"]) == "⟨c3⟩⟨af⟩", "a word of its own: bytes that make a character are never shown"
    assert join_tokens([]) == ""


def test_special_tokens_and_tags_come_first():
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    for tokenizer in (BPE, CHAR, WORD):
        assert tokenizer.tags == TAGS
        assert [tokenizer.tag("<2de>"), tokenizer.tag("<2en>")] == [4, 5]
    with pytest.raises(UserError, match="<2fr>"):
        BPE.tag("<2fr>")


def test_bytes_follow_the_tags_in_order():
    assert train([], "bpe", 262, TAGS).encode("a\n") == [6 + 97, 6 + 10]
    assert train([], "char", 262, TAGS).encode("é") == [6 + 0xC3, 6 + 0xA9]


def test_bpe_merges_the_most_frequent_pair_first():
    # "aab" 3 times: pairs are a-a 3 and a-b 3; the tie goes to the smaller pair, a-a; then aa-b.
    tokenizer = train(["aab", "aab", "aab"], "bpe", 400)
    assert len(tokenizer) == 4 + 256 + 2
    assert tokenizer.encode("aab") == [4 + 256 + 1]
    assert tokenizer.encode("aa") == [4 + 256]
    assert tokenizer.encode("ab") == [4 + 97, 4 + 98]


def test_the_size_includes_all_tokens_and_is_never_exceeded():
    assert len(train(["ab cd ef gh"] * 9, "bpe", 263)) == 263
    assert len(train(["äöüß"], "char", 262)) == 262
    assert len(train(["a b c d"], "word", 6)) == 6


def test_too_small_a_vocabulary_is_refused():
    for unit in ("bpe", "char"):
        assert len(train(["ab"], unit, 262, TAGS)) == 262
        with pytest.raises(UserError, match="at least 262"):
            train(["ab"], unit, 261, TAGS)
    with pytest.raises(UserError, match="at least 5"):
        train(["ab"], "word", 4)
    with pytest.raises(UserError, match="syllable"):
        train(["ab"], "syllable", 400)
    for unit in ("wordpiece", "sentencepiece"):
        with pytest.raises(UserError, match="only imported models have"):
            train(["ab"], unit, 400)
    with pytest.raises(UserError, match="tags"):
        train(["ab"], "bpe", 400, ["<a>", "<a>"])


def test_unknown_characters_are_encoded_as_bytes():
    tokenizer = train(["ää ö"], "char", 261)  # room for one: ä, the more frequent
    assert tokenizer.encode("äö") == [260, 4 + 0xC3, 4 + 0xB6]
    assert tokenizer.token_texts(tokenizer.encode("äö")) == ["ä", "⟨c3⟩", "⟨b6⟩"]


def test_words_are_ranked_by_frequency_then_by_text():
    tokenizer = train(["b a c c", "d a b"], "word", 7)  # a 2, b 2, c 2, d 1
    assert tokenizer.encode(" c  b\ta d ") == [6, 5, 4, UNK]
    assert tokenizer.decode([BOS, 6, 5, UNK, 4, EOS]) == "c b a"
    assert tokenizer.token_texts([BOS, 6, 5, UNK, EOS]) == ["<s>", "c", " b", "<unk>", "</s>"]


def test_decoding_skips_special_tokens_and_token_texts_name_them():
    ids = [PAD, BOS, 4, *BPE.encode("the cat"), UNK, EOS]
    assert BPE.decode(ids) == "the cat"
    tokens = BPE.token_texts(ids)
    assert tokens[:3] == ["<pad>", "<s>", "<2de>"] and tokens[-2:] == ["<unk>", "</s>"]
    assert "".join(tokens[3:-2]) == "the cat"


def test_half_a_character_decodes_to_the_replacement_character():
    first_byte = BPE.first + 0xE2
    assert BPE.decode([first_byte]) == "\ufffd"
    assert BPE.token_texts([first_byte, BPE.first + 65]) == ["⟨e2⟩", "A"]


def test_special_tokens_and_line_breaks_are_forbidden():
    tokenizer = train(["a \n\n b \n\n", "a \n\n c \n\n"] * 5, "bpe", 400, TAGS)
    forbidden = tokenizer.forbidden()
    assert forbidden[:5] == [PAD, BOS, UNK, 4, 5] and EOS not in forbidden
    for token in range(tokenizer.first, len(tokenizer)):
        breaks = any(sign in tokenizer.decode([token]) for sign in "\n\r")
        assert breaks == (token in forbidden)
    assert len(forbidden) > 7, "longer tokens than the two bytes are in the vocabulary"
    assert WORD.forbidden() == [PAD, BOS, UNK, 4, 5]


@pytest.mark.parametrize("tokenizer", [BPE, CHAR, WORD], ids=["bpe", "char", "word"])
def test_json_round_trip(tokenizer):
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.to_json() == tokenizer.to_json()
    assert (len(again), again.tags, again.forbidden()) == (len(tokenizer), TAGS, tokenizer.forbidden())
    for text in [*TEXTS, "unseen ☃ </s>"]:
        assert again.encode(text) == tokenizer.encode(text)


def test_other_json_is_refused():
    newer = json.dumps(json.loads(BPE.to_json()) | {"version": 99})
    for wrong in ("", "[]", "{}", '{"format": "regard tokenizer", "version": 1}', newer):
        with pytest.raises(UserError, match="tokenizer"):
            Tokenizer.from_json(wrong)


def test_a_lone_surrogate_is_an_error():
    for tokenizer in (BPE, CHAR):
        with pytest.raises(UserError, match=r"udc80"):
            tokenizer.encode("a\udc80")


def test_the_same_texts_give_the_same_tokenizer_in_another_process():
    program = f"from regard.text import train; print(ascii(train({TEXTS!r}, 'bpe', 300, {TAGS!r}).to_json()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ascii(BPE.to_json())


PIECES = ["the", "cat", "un", "##cat", "##s", ",", "[", "]", "mask", "unk", "a"]


def test_wordpiece_takes_the_longest_subwords():
    tokenizer = WordPieceTokenizer(TAGS, PIECES, lowercase=True, strip_accents=None, chinese=True)
    the, cat, un, inner_cat, s, comma, left, right, mask, unk, a = range(6, 17)
    assert tokenizer.encode("The uncats,the dog") == [the, un, inner_cat, s, comma, the, UNK]
    assert tokenizer.encode("Á cät") == [a, cat], "lower-casing strips accents, as BERT does, unless told not to"
    assert tokenizer.encode("[MASK] [UNK]") == [left, mask, right, left, unk, right], "brackets are text"
    assert tokenizer.decode([BOS, the, un, inner_cat, s, 4, comma, UNK, cat, EOS]) == "the uncats , cat"
    assert tokenizer.token_texts([BOS, the, un, s, 5, EOS]) == ["<s>", "the", " un", "s", "<2en>", "</s>"]
    assert tokenizer.forbidden() == [PAD, BOS, UNK, 4, 5] and len(tokenizer) == 17
    kept = WordPieceTokenizer(TAGS, ["The", "Á"], lowercase=False, strip_accents=None, chinese=True)
    assert kept.encode("The the Á") == [6, UNK, 7]
    with pytest.raises(UserError, match="udc80"):
        tokenizer.encode("a\udc80")


def sentencepieces(sentences):
    """Train a SentencePiece model; return it in base 64, and its subwords without the three special tokens."""
    if not os.environ.get("CI"):  # there it has to be installed
        pytest.importorskip("sentencepiece", reason="needs regard[formats]")
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=50, hard_vocab_limit=False, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    words = [processor.id_to_piece(number) for number in range(3, len(processor))]
    return base64.b64encode(model.getvalue()).decode(), words, processor


def test_sentencepiece_splits_as_its_model_and_each_side_has_its_own():
    source, words, processor = sentencepieces(TEXTS[:2] * 9)
    target, others, _ = sentencepieces(TEXTS[2:] * 9)
    tokens = list(dict.fromkeys([*words, *others]))[::-1]  # any order: ids are the vocabulary's, not the model's
    tokenizer = SentencePieceTokenizer(TAGS, tokens, source, target)
    for text in [*TEXTS[:2], "  the   cat ", "the ☃", "</s> <2de>", ""]:
        expected = [tokens.index(p) + 6 if p in tokens else UNK for p in processor.encode(text, out_type=str)]
        assert tokenizer.encode(text) == expected
    assert tokenizer.decode([BOS, *tokenizer.encode("the  cat sat"), EOS]) == "the cat sat"
    assert "".join(tokenizer.token_texts(tokenizer.encode("the cat sat"))) == "the cat sat"
    assert not {4, 5, EOS} & set(tokenizer.encode("</s> <2de> the"))
    other = tokenizer.target_side()
    assert other.decode(other.encode(TEXTS[2])) == TEXTS[2] and len(other) == len(tokenizer)
    assert tokenizer.encode(TEXTS[2]) != other.encode(TEXTS[2])
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert again.target_side().encode(TEXTS[2]) == other.encode(TEXTS[2])


def test_byte_tokens_join_to_characters():
    tokenizer = SentencePieceTokenizer((), ["▁a", "<0xC3>", "<0xA9>", "<0x0A>", "b▁"], model="")
    assert tokenizer.decode([4, 5, 6, 8, 7]) == "aéb"
    assert (
        tokenizer.token_texts([4, 5, 6]) == ["a", "⟨c3⟩", "⟨a9⟩"]
        and join_tokens(tokenizer.token_texts([4, 5, 6])) == "aé"
    )
    assert tokenizer.forbidden()[-1] == 7, "a line feed"


def test_the_original_ids_are_kept():
    tokenizer = WordPieceTokenizer(("<mask>",), PIECES, lowercase=True, strip_accents=None, chinese=True)
    tokenizer.foreign = ForeignVocabulary(
        [0, 12, 13, 14, 15, *range(1, 12)], ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    )
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.foreign == tokenizer.foreign and again.encode("the uncats") == tokenizer.encode("the uncats")
    wrong = json.loads(tokenizer.to_json())
    wrong["foreign"]["ids"].pop()
    with pytest.raises(UserError, match="15 foreign ids for 16 tokens"):
        Tokenizer.from_json(json.dumps(wrong))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_encoding_prints_nothing_and_still_encodes():
    program = (
        "import os, regard.text as r; t = r.train(['a b c'] * 9, 'bpe', 300); t.encode_batch(['a b'] * 999)\n"
        "child = os.fork()\n"
        "if child == 0: t.encode_batch(['a b'] * 999); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("7", "")


@pytest.mark.parametrize("unit", ["word", "bpe", "char"])
def test_a_masked_word_becomes_the_unknown_token(unit: str):
    """Wherever it stands; what contains it is another word, and the others are encoded as without it."""
    texts = ["a ___ cross", "___ cross ___ ___", "a cross", "a___ cross", "___"]
    tokenizer = train(["a cross and a___ star"] * 9, unit, 300)
    tokens, truncated = encode_side(tokenizer, texts, tag=None, max_len=99, lowercase=False, masked_word="___")
    a, a_cross, cross = (tokenizer.encode(text) for text in ("a", "a cross", " cross"))
    assert tokens[:4] == [[*a, UNK, *cross, EOS], [UNK, *cross, UNK, UNK, EOS], [*a_cross, EOS],
                          [*tokenizer.encode("a___ cross"), EOS]]  # fmt: skip
    assert tokens[4] == [UNK, EOS] and not any(truncated)
    assert tokenizer.decode([token for token in tokens[0] if token != UNK]) == "a cross"
