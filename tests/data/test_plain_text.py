"""Plain text: documents, streams and held-out text, from the file to cached tokens and windows."""

import gzip
import lzma
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.corpora import held_out, read_pairs
from regard.data.labelled import ClassIds
from regard.data.packing import Packer, fill_ratio
from regard.data.stream import StreamPosition
from regard.data.token_cache import __name__ as STORE
from regard.data.token_cache import build
from regard.data.token_store import TokenStore
from regard.data.vocabulary import learn_tokenizers
from regard.data.windows import TokenWindows
from regard.errors import UserError
from regard.recipes.schema import DataSettings, Recipe
from regard.text import BOS, EOS, encode_stream, train
from regard.text.encode import chunk, encode_lines, stream_parts
from regard.text.tokenizers import ForeignVocabulary

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))


def texts(folder, content, **settings):
    (folder / "a.txt").write_bytes(content.encode())
    data = DataSettings(folder=str(folder), text="a.txt", **settings)
    return data, [text for _, text in read_pairs(data, data)]


def held(data, split="valid"):
    return [text for _, text in held_out(data, split)]


# documents


def test_a_document_is_a_line_a_paragraph_or_a_line_of_a_stream(tmp_path):
    content = "one\ntwo\r\n\n \nthree"
    assert texts(tmp_path, content, documents="line")[1] == ["one", "two", "three"]
    assert texts(tmp_path, content, documents="paragraph")[1] == ["one\ntwo", "three"]
    assert texts(tmp_path, content, documents="stream")[1] == ["one\n", "two\n", "\n", " \n", "three"]
    assert texts(tmp_path, content, documents="line", count=2)[1] == ["one", "two"]
    assert texts(tmp_path, "ONE\n", lowercase=True)[1] == ["one"]


def test_a_document_is_a_pair_with_an_empty_source(tmp_path):
    data, _ = texts(tmp_path, "one\n\ntwo\n")
    assert list(read_pairs(data, data)) == [("", "one"), ("", "two")]


def test_compressed_text_is_found_without_its_suffix(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("größer\n".encode()))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\n"))
    for name, found in (("a.txt", "größer"), ("b.txt", "two")):
        data = DataSettings(folder=str(tmp_path), text=name)
        assert list(read_pairs(data, data)) == [("", found)]


def test_a_header_names_the_columns_of_every_tsv_file(tmp_path):
    (tmp_path / "a.tsv").write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    data = DataSettings(folder=str(tmp_path), pairs="a.tsv", test=["a.tsv"], header=True, count=1)
    assert list(read_pairs(data, data)) == [("good", "1")]
    assert held_out(data, "test") == [("good", "1"), ("bad", "0")]


# what is held out


def test_a_stream_holds_out_its_last_characters_exactly(tmp_path):
    content = "abc\ndefgh\n\nij\nklm"  # 17 characters: int(0.7 * 17) = 11
    for share, border in ((0.3, 11), (0.1, 15), (0.8, 3), (0.5, 8)):
        data, trained = texts(tmp_path, content, documents="stream", held_out=share)
        assert "".join(trained) == content[:border]
        assert held(data) == held(data, "test") == [content[border:]]


def test_documents_are_held_out_whole(tmp_path):
    data, trained = texts(tmp_path, "".join(f"{n}\n" for n in range(10)), documents="line", held_out=0.2)
    assert trained == list("01234567") and held(data) == list("89")
    data, trained = texts(tmp_path, "a\nb\n\nc\n\nd\n", documents="paragraph", held_out=0.5)
    assert trained == ["a\nb"] and held(data) == ["c", "d"]


def test_held_out_files_take_precedence_and_a_stream_is_one_text(tmp_path):
    (tmp_path / "v.txt").write_text("x\n\ny\n")
    settings = {"valid": ["v.txt"], "held_out": 0.5}
    assert held(texts(tmp_path, "a\n\nb\n", **settings)[0]) == ["x", "y"]
    data, _ = texts(tmp_path, "a\nb\n", documents="stream", **settings)
    assert held(data) == ["x\n\ny\n"] and held(data, "test") == ["b\n"]


def test_without_held_out_text_the_error_names_the_settings(tmp_path):
    with pytest.raises(UserError, match=r"no valid text: set data\.valid, or data\.held_out"):
        held(texts(tmp_path, "a\n")[0])
    with pytest.raises(UserError, match=r"a\.txt: no text"):
        texts(tmp_path, "\n \n")


def test_the_built_in_stories_have_their_own_splits():
    data = DataSettings(corpus="stories", count=3)
    assert len(list(read_pairs(data, data))) == 3 and len(held(data)) == 500
    [whole] = held(DataSettings(corpus="stories", documents="stream"))
    assert whole.splitlines() == held(data)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")
def test_tiny_shakespeare_is_cut_after_nine_tenths():
    data = DataSettings(folder=str(SHARED / "tinyshakespeare"), text="input.txt", documents="stream", held_out=0.1)
    size, [rest] = sum(len(text) for _, text in read_pairs(data, data)), held(data)
    assert (size, len(rest)) == (1_003_854, 111_540)  # of 1,115,394


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data")
def test_wikitext_has_as_many_tokens_as_published():
    """217,646 with the end of every line, of which the test counts the words and the lines."""
    data = DataSettings(folder=str(SHARED / "wikitext2"), text="wiki.valid.tokens", documents="stream")
    lines = [text for _, text in read_pairs(data, data)]
    words = train(lines, "word", 40_000)
    assert sum(map(len, encode_lines(words, lines))) == 217_646


# stored tokens


def recipe(folder, content, model=None, training=None, text=None, **data):
    (folder / "a.txt").write_text(content)
    return Recipe.model_validate(
        {
            "data": {"folder": str(folder), "text": "a.txt", "documents": "line", **data},
            "text": text or {"unit": "word"},
            "model": {"family": "gpt", "size": "nano", **(model or {})},
            "training": training or {},
        }
    )


def stored(plan):
    tokenizer, same = learn_tokenizers(plan)
    assert tokenizer is same
    [store] = build(plan, tokenizer, tokenizer)
    targets = [store.target[n].tolist() for n in range(len(store))]
    assert store.source.lengths().tolist() == [0] * len(store)
    return tokenizer, targets, store.report


def test_documents_end_with_eos_and_have_empty_sources(tmp_path):
    _, targets, report = stored(recipe(tmp_path, "b a b b\n\na\n"))  # b is more frequent
    assert targets == [[4, 5, 4, 4, EOS], [5, EOS]]
    assert (report.documents, report.pairs, report.target_tokens, report.source_tokens) == (2, 2, 7, 0)


def test_the_chunks_of_long_documents_concatenate_to_the_same_tokens(tmp_path):
    lines = [" ".join("abcdefg"[:n]) for n in (7, 3, 4, 1)]
    for longest in (2, 3, 4, 64):
        plan = recipe(tmp_path, "\n".join(lines), {"max_positions": longest})
        tokenizer, targets, report = stored(plan)
        assert [t for part in targets for t in part] == [t for line in lines for t in [*tokenizer.encode(line), EOS]]
        assert max(map(len, targets)) <= longest
        assert report.pairs == sum(-(-(n + 1) // longest) for n in (7, 3, 4, 1)) and report.documents == 4


def test_no_chunk_is_eos_alone(tmp_path):
    for longest in (2, 3, 4):
        for words in (longest, 2 * longest, 3 * longest):  # EOS does not fit into the last chunk
            plan = recipe(tmp_path, "a " * words, {"max_positions": longest})
            lengths = list(map(len, stored(plan)[1]))
            assert lengths == [longest] * (words // longest - 1) + [longest - 1, 2]


def test_a_context_without_room_for_text_is_an_error(tmp_path):
    plan = recipe(tmp_path, "a b c\n", {"family": "bert", "size": "tiny", "max_positions": 2})
    with pytest.raises(UserError, match=r"no position left beside the special tokens: raise model\.max_positions"):
        stored(plan)
    assert len(stored(recipe(tmp_path, "a b c\n", {"family": "bert", "size": "tiny", "max_positions": 3}))[1]) == 3


def test_no_chunk_is_longer_than_a_batch(tmp_path):
    plan = recipe(tmp_path, "a " * 40, training={"batch_tokens": 16})
    assert list(map(len, stored(plan)[1])) == [16, 16, 9]


def test_bert_reads_every_chunk_between_bos_and_eos(tmp_path):
    plan = recipe(tmp_path, "a b c d e\na\n", {"family": "bert", "size": "tiny", "max_positions": 4})
    tokenizer, targets, _ = stored(plan)
    assert tokenizer.tags == ("<mask>",)
    assert [part[0] for part in targets] == [BOS] * 4 and [part[-1] for part in targets] == [EOS] * 4
    assert [tokenizer.decode(part[1:-1]) for part in targets] == ["a b", "c d", "e", "a"]


def test_bert_reads_texts_to_classify_between_bos_and_eos(tmp_path):
    (tmp_path / "a.tsv").write_text("good film\tyes\nbad\tno\n")
    settings = {
        "data": {"folder": str(tmp_path), "pairs": "a.tsv"},
        "text": {"unit": "char"},
        "model": {"family": "bert", "size": "tiny", "task": "classify"},
    }
    plan = Recipe.model_validate(settings)
    source, _ = learn_tokenizers(plan, labels=True)
    assert (source.unit, source.tags) == ("char", ("<mask>",))
    [store] = build(plan, source, ClassIds(["no", "yes", "not bad"]))
    assert store.source[1].tolist() == [BOS, *source.encode("bad"), EOS]
    assert store.target[0].tolist() == [1]
    (tmp_path / "a.tsv").write_text("good film\tnot  bad\n")
    [store] = build(plan, source, ClassIds(["no", "yes", "not bad"]))
    assert store.target.ids.tolist() == [2]


@pytest.mark.parametrize("unit", ["bpe", "char"])
def test_a_stream_is_one_sequence_without_special_tokens(tmp_path, unit):
    content = "the cat\n\n\n  sat on \n the\tmat\nno end" * 3
    plan = recipe(tmp_path, content, text={"unit": unit, "vocabulary": 280}, documents="stream")
    tokenizer, [run], report = stored(plan)
    assert tokenizer.decode(run) == content and min(run) >= tokenizer.first
    assert run == encode_stream(tokenizer, content) and report.pairs == 1


def imported(texts):
    """A tokenizer like that of an imported GPT-2."""
    tokenizer = train(texts, "bpe", 320)
    tokenizer.foreign = ForeignVocabulary(list(range(len(tokenizer))), [None] * tokenizer.first)
    return tokenizer


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_an_imported_models_stream_is_cached_as_if_encoded_at_once(tmp_path, monkeypatch, chunk):
    content = "\n\n a\n\n\nb  \n    indented\n\n \nc\n    x\n\n\n" * 5
    plan = recipe(tmp_path, content, text={"unit": "bpe", "vocabulary": 280}, documents="stream")
    tokenizer = imported([content] * 3)
    monkeypatch.setattr(f"{STORE}.BLOCK_PAIRS", chunk)
    [store] = build(plan, tokenizer, tokenizer)
    assert store.target[0].tolist() == tokenizer.encode(content) == encode_stream(tokenizer, content)
    assert store.report.documents == content.count("\n")


BLANKS = imported(["\n\n \n  a\n\n\n\n b \n\t\n\xa0\n 'll\n\n"] * 9)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("\n\n\n  \t\r\x0b\x1c\x85\xa0\u2028\u3000ab1'.é", max_size=12), max_size=6))
def test_an_imported_models_stream_does_not_depend_on_its_parts(parts):
    whole = "".join(parts)
    assert encode_stream(BLANKS, parts) == BLANKS.encode(whole)
    assert "".join(stream_parts(BLANKS, parts)) == whole


def test_in_a_stream_of_words_eos_ends_lines(tmp_path):
    tokenizer, [run], _ = stored(recipe(tmp_path, "a b\n\na", documents="stream"))
    a, b = tokenizer.encode("a b")
    assert run == [a, b, EOS, EOS, a]


def test_every_relevant_change_gives_a_new_entry(tmp_path):
    plans = [
        recipe(tmp_path, "a b\nc d\n\ne f\ng h\n", **change)
        for change in ({}, {"documents": "paragraph"}, {"documents": "stream"}, {"held_out": 0.25}, {"count": 2})
    ]
    tokenizer, _ = learn_tokenizers(plans[0])
    runs = [build(plan, tokenizer, tokenizer)[0].target.ids.tolist() for plan in plans]
    assert len({tuple(run) for run in runs}) == 5


def test_chunks_concatenate_to_the_whole():
    for size in range(12):
        for longest in (1, 3, 5, 20):
            parts = chunk(range(size), longest)
            assert [t for part in parts for t in part] == list(range(size))
            assert all(len(part) == longest for part in parts[:-1])


# packing


def test_documents_are_packed_as_targets_of_empty_sources():
    store = TokenStore.of([[]] * 30, [[n, *range(200, 200 + n % 5), EOS] for n in range(100, 130)])
    for static in (False, True):
        packer = Packer([store], [1.0], target_budget=20, seed=1, static=static)
        assert packer.source_budget == 0 and packer.dropped_long == 0
        seen = []
        for batch, position in packer.batches():
            if position.epoch:
                break
            rows = batch.inputs.layout
            assert batch.source.layout.lengths == (0,) * len(rows) and batch.source.ids.shape == (0,)
            assert rows.size == (20 if static else rows.tokens)
            for inputs, labels in zip(rows.split(batch.inputs.ids), rows.split(batch.labels), strict=True):
                assert inputs[0] == BOS and torch.equal(inputs[1:], labels[:-1]) and labels[-1] == EOS
                seen.append(int(labels[0]))
            assert set(fill_ratio(batch)) == {"target", "padded"}
        assert sorted(seen) == list(range(100, 130))


def stream(size=1000, first=10):
    return TokenStore.of([[]], [list(range(first, first + size))])


def windows(size=1000, context=8, batch_tokens=32, seed=1, **settings):
    return TokenWindows([stream(size)], [1.0], context=context, batch_tokens=batch_tokens, seed=seed, **settings)


def epoch_of(packer, epoch=0):
    found = []
    for batch, position in packer.batches(StreamPosition(epoch, 0)):
        if position.epoch != epoch:
            return found
        found.append(batch)


def same(one, other):
    return torch.equal(one.inputs.ids, other.inputs.ids) and torch.equal(one.labels, other.labels)


def test_windows_cover_the_text_once_an_epoch():
    """1000 tokens in windows of 8: offset at most 7, remainder at most 7, left over at most 3 windows of 4 a batch."""
    for epoch in range(5):
        positions = torch.cat([batch.inputs.ids for batch in epoch_of(windows(), epoch)])
        assert len(positions.unique()) == len(positions) >= 1000 - 7 - 7 - 3 * 8
        assert positions.min() >= 10 and positions.max() < 10 + 999


def test_labels_are_the_inputs_shifted_by_one():
    for batch in epoch_of(windows()):
        assert batch.inputs.layout.lengths == (8,) * 4 and batch.inputs.layout.equal_lengths
        assert torch.equal(batch.labels, batch.inputs.ids + 1), "the text counts upwards"
        assert torch.equal(batch.inputs.ids.view(4, 8).diff(dim=1), torch.ones(4, 7, dtype=torch.long))
        assert batch.source.layout.lengths == (0,) * 4 and batch.num_targets == 32
        assert fill_ratio(batch) == {"target": 1.0, "padded": 1.0}


def test_every_epoch_has_its_own_offset_and_order():
    starts = [[int(batch.inputs.ids[0]) for batch in epoch_of(windows(), epoch)] for epoch in range(12)]
    assert len({begins[0] % 8 for begins in starts}) > 3
    assert all(begins != sorted(begins) for begins in starts)
    assert starts[0] == [int(batch.inputs.ids[0]) for batch in epoch_of(windows(), 0)]
    assert starts[0] != [int(batch.inputs.ids[0]) for batch in epoch_of(windows(seed=2), 0)]


def test_resumed_equals_uninterrupted_and_a_batch_is_a_function_of_its_step():
    packer = windows(150)
    run = list(islice(packer.batches(), 36))
    assert run[-1][1].epoch >= 2
    for step, (batch, position) in enumerate(run):
        assert same(batch, packer.batch_at(step))
        for (found, _), (expected, _) in zip(packer.batches(position), run[step + 1 :], strict=False):
            assert same(found, expected)


def test_weights_set_how_often_a_text_is_visited():
    stores = [stream(401, 1000), stream(401, 5000)]
    packer = TokenWindows(stores, [2.0, 0.5], context=4, batch_tokens=4, seed=1)
    first = np.array([int(batch.inputs.ids[0]) for batch in epoch_of(packer)])
    assert 198 <= (first < 5000).sum() <= 200 and 49 <= (first >= 5000).sum() <= 50


def test_a_window_needs_one_token_more_than_the_context():
    with pytest.raises(UserError, match="8 tokens is too short for windows of 8"):
        windows(8)
    batch = windows(9, batch_tokens=4).batch_at(0)
    assert (batch.inputs.ids.tolist(), batch.labels.tolist()) == (list(range(10, 18)), list(range(11, 19)))
    with pytest.raises(UserError, match="too few training windows"):
        windows(20).batch_at(0)
