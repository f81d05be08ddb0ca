"""The token cache: tokens equal the tokenizer's, are computed once, and again when the input changes."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from regard.data import token_cache as module
from regard.data import token_files, workers
from regard.data.cache_entry import CacheEntry
from regard.data.cache_key import cache_folder
from regard.data.corpus_encoder import CorpusEncoder
from regard.data.labelled import ClassIds
from regard.data.token_cache import build
from regard.data.token_store import CorpusReport, Ragged, TokenStore
from regard.data.vocabulary import learn_tokenizers, sample
from regard.errors import UserError
from regard.recipes.schema import Recipe
from regard.text import EOS, train


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def recipe(folder, lines="one two\teins zwei\n", text=None, **settings):
    (folder / "a.tsv").write_text(lines)
    data = {} if "mix" in settings else {"pairs": "a.tsv"}
    return Recipe.model_validate(
        {"data": {"folder": str(folder), **data, **settings}, "text": text or {"unit": "word"}}
    )


def made(plan):
    """The stores of a recipe, with newly trained tokenizers, and whether the corpus was read."""
    read = []
    stores = build(plan, *learn_tokenizers(plan), progress=lambda name, pairs: read.append((name, pairs)))
    return stores, read


def lists(ragged):
    return [ragged[index].tolist() for index in range(len(ragged))]


def test_cached_tokens_are_the_tokenizers_with_eos(tmp_path):
    plan = recipe(tmp_path, "b a\tx\na b b\ty x\n", {"unit": "word", "shared": False})
    source, target = learn_tokenizers(plan)  # b 3, a 2; x 2, y 1: ids from 4
    [store] = build(plan, source, target)
    assert lists(store.source) == [[4, 5, EOS], [5, 4, 4, EOS]]
    assert lists(store.target) == [[4, EOS], [5, 4, EOS]]
    assert (store.source.ids.dtype, store.source.offsets.dtype) == (np.uint16, np.int64)
    assert store.report == CorpusReport(2, 0, 0, 7, 5) and len(store) == 2


def test_tags_come_first(tmp_path):
    (tmp_path / "b.tsv").write_text("a\tc\n")
    mix = [{"pairs": "a.tsv", "source_tag": "<2de>"}, {"pairs": "b.tsv", "source_tag": "<2fr>", "target_tag": "<fr>"}]
    plan = recipe(tmp_path, "a\tb\n", mix=mix)  # ids: <2de> 4, <2fr> 5, <fr> 6; a 7 (seen twice), b 8, c 9
    [one, other] = made(plan)[0]
    assert (lists(one.source), lists(one.target)) == ([[4, 7, 2]], [[8, 2]])
    assert (lists(other.source), lists(other.target)) == ([[5, 7, 2]], [[6, 9, 2]])


def test_tags_belong_to_their_side_unless_the_vocabulary_is_shared(tmp_path):
    plan = recipe(tmp_path, text={"shared": False}, source_tag="<2de>", target_tag="<de>")
    source, target = learn_tokenizers(plan)
    assert (source.tags, target.tags) == (("<2de>",), ("<de>",))
    one, other = learn_tokenizers(recipe(tmp_path, source_tag="<2de>", target_tag="<de>"))
    assert one is other and one.tags == ("<2de>", "<de>")


def test_blank_and_long_pairs_are_dropped_and_counted(tmp_path):
    # with EOS: 2 and 2, blank, blank, 3 and 4 (one too long), 3 and 3
    plan = recipe(tmp_path, "a\tb\n\tb\na\t \na b\ta b c\na b\ta b\n", max_length=3)
    [store], _ = made(plan)
    assert store.report == CorpusReport(pairs=2, dropped_empty=2, dropped_long=1, source_tokens=5, target_tokens=5)
    with pytest.raises(UserError, match=r"a\.tsv: no usable sentence pairs \(1 blank, 1 longer than 2 tokens\)"):
        made(recipe(tmp_path, "a b\tc\n\tx\n", max_length=2))


def test_in_a_shared_context_the_length_of_a_pair_is_the_sum(tmp_path):
    # with EOS: 2 + 3, 3 + 3, 4 + 2, 2 + 6
    lines = "a\tb c\na b\tb c\na b c\td\na\ta b c d e\n"
    plan = recipe(tmp_path, lines)
    model = {"family": "gpt", "size": "nano", "max_positions": 6}
    gpt = Recipe.model_validate({**plan.model_dump(), "model": model})
    tokenizers = learn_tokenizers(plan)
    for one, pairs in ((plan, 4), (gpt, 3)):  # also after the other: the cache tells them apart
        [store] = build(one, *tokenizers)
        assert (store.report.pairs, store.report.dropped_long) == (pairs, 4 - pairs)
    tight = Recipe.model_validate({**plan.model_dump(), "model": {**model, "max_positions": 4}})
    with pytest.raises(UserError, match=r"\(0 blank, 4 longer than 4 tokens or than 4 for both sides\)"):
        build(tight, *tokenizers)


def test_an_unknown_class_is_an_error(tmp_path):
    plan = recipe(tmp_path, "good\tyes\nbad\tno\n", {"unit": "word"})
    model = {"family": "bert", "size": "tiny", "task": "classify"}
    plan = Recipe.model_validate({**plan.model_dump(), "task": "classification", "model": model})
    source, classes = learn_tokenizers(plan, labels=True)[0], ClassIds(["no", "yes"])
    assert [*source.words] == ["bad", "good"]  # nothing is learned from the classes
    [store] = build(plan, source, classes)
    assert lists(store.target) == [[1], [0]]
    (tmp_path / "a.tsv").write_text("good\tyes\nsoso\tmaybe\n")
    with pytest.raises(UserError, match=r"a\.tsv: 'maybe' is not a class of this model, which has no, yes"):
        build(plan, source, classes)


def test_several_chunks_equal_one_chunk(tmp_path, monkeypatch):
    lines = "".join(f"{'a ' * (n % 5 + 1)}b\tc {n}\n" for n in range(25))
    [whole], _ = made(recipe(tmp_path, lines))
    monkeypatch.setattr(module, "BLOCK_PAIRS", 10)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "other"))
    [parts], read = made(recipe(tmp_path, lines))
    assert [pairs for _, pairs in read] == [10, 20, 25]
    assert lists(parts.source) == lists(whole.source) and lists(parts.target) == lists(whole.target)


def test_large_vocabularies_take_four_bytes(tmp_path):
    plan = recipe(tmp_path)
    small = train([" ".join(map(str, range(65532)))], "word", 65536)
    large = train([" ".join(map(str, range(65533)))], "word", 65537)
    [store] = build(plan, small, large)
    assert (store.source.ids.dtype, store.target.ids.dtype) == (np.uint16, np.uint32)


def test_a_cached_corpus_is_not_read_again(tmp_path):
    plan = recipe(tmp_path)
    assert made(plan)[1] == [("a.tsv", 1)]
    stores, read = made(plan)
    assert read == [] and stores[0].report.pairs == 1


def test_every_relevant_change_gives_a_new_entry(tmp_path):
    tokenizer = train(["one two eins zwei"], "word", 300, ["<t>"])
    base = recipe(tmp_path)
    build(base, tokenizer, tokenizer)

    def read(plan, source=tokenizer):
        seen = []
        build(plan, source, tokenizer, lambda name, pairs: seen.append(pairs))
        return bool(seen)

    assert not read(base)
    os.utime(tmp_path / "a.tsv", ns=(1, 1))
    assert not read(base), "the file was written again with the same content"
    assert read(recipe(tmp_path, "one two\teins drei\n")), "of the same size"
    for change in ({"max_length": 9}, {"lowercase": True}, {"count": 1}, {"source_tag": "<t>"}, {"target_tag": "<t>"}):
        plan = recipe(tmp_path, **change)
        assert read(plan) and not read(plan), change
    assert read(base, train(["one"], "word", 300)), "another tokenizer"
    plan = recipe(tmp_path, weight=2.0)
    assert not read(plan), "a weight changes how often pairs are visited, not the pairs"


def test_a_damaged_entry_is_replaced(tmp_path, cache):
    plan = recipe(tmp_path)
    made(plan)
    [folder] = cache.iterdir()
    for damage in ("source.ids", "target.offsets", "about.json"):
        content = (folder / damage).read_bytes()
        (folder / damage).write_bytes(content[: len(content) // 2])
        stores, read = made(plan)
        assert read and lists(stores[0].source)[0][-1] == EOS
        (folder / damage).unlink()
        assert made(plan)[1] and not made(plan)[1]


def test_a_failed_build_leaves_nothing_behind(tmp_path, cache):
    plan = recipe(tmp_path, "one\teins\n")
    tokenizers = learn_tokenizers(plan)
    (tmp_path / "a.tsv").write_text("one\teins\nbroken\n")
    with pytest.raises(UserError, match="line 2"):
        build(plan, *tokenizers)
    assert list(cache.iterdir()) == []


def test_drafts_of_killed_processes_are_removed_after_a_day(tmp_path, cache):
    for name, age in (("old", 2 * 24 * 3600), ("new", 3600)):
        draft = cache / f"{name}.draft"
        draft.mkdir(parents=True)
        (draft / "source.ids").write_bytes(b"12")
        for path in (draft / "source.ids", draft):
            os.utime(path, (time.time() - age,) * 2)
    made(recipe(tmp_path))
    assert not (cache / "old.draft").exists() and (cache / "new.draft").exists()


def test_two_concurrent_processes_both_succeed(tmp_path, cache):
    plan = recipe(tmp_path, "".join(f"a b {n}\tc {n}\n" for n in range(2000)))
    (tmp_path / "recipe.json").write_text(plan.model_dump_json())
    program = (
        "import sys; from regard.data.token_cache import *; from regard.data.vocabulary import *\n"
        "from regard.recipes.schema import Recipe\n"
        "plan = Recipe.model_validate_json(open(sys.argv[1]).read())\n"
        "[store] = build(plan, *learn_tokenizers(plan)); print(store.source.ids.sum(), len(store))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "recipe.json")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0] == answers[1] and answers[0].endswith(" 2000\n")
    assert len(list(cache.iterdir())) == 1


def test_without_locks_the_second_process_uses_the_entry_of_the_first(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(CacheEntry, "_lock", lambda entry, say: nullcontext())
    plan = recipe(tmp_path)
    tokenizers = learn_tokenizers(plan)

    def overtake(name, pairs):
        nested = build(plan, *tokenizers)  # another build of the same ends while this one is under way
        assert len(nested[0]) == 1

    assert len(build(plan, *tokenizers, overtake)[0]) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_second_process_waits_for_the_first_and_builds_nothing(tmp_path, cache):
    plan = recipe(tmp_path)
    tokenizers, events = learn_tokenizers(plan), []
    first_reads, first_may_end = threading.Event(), threading.Event()

    def first_progress(name, pairs):
        events.append("first builds")
        first_reads.set()
        assert first_may_end.wait(60)

    def second_says(line):
        events.append(line)
        first_may_end.set()

    def second_builds(name, pairs):
        events.append("second builds")

    with ThreadPoolExecutor(2) as threads:  # a lock excludes threads as it does processes
        first = threads.submit(build, plan, *tokenizers, first_progress)
        assert first_reads.wait(60)
        second = threads.submit(build, plan, *tokenizers, second_builds, second_says)
        assert first.result()[0].digest == second.result()[0].digest
    assert events == ["first builds", "waiting for another process, which prepares the tokens of a.tsv"]


def test_an_entry_is_found_by_content_on_another_machine(tmp_path, cache, monkeypatch):
    (tmp_path / "here").mkdir()
    plan = recipe(tmp_path / "here")
    tokenizers = learn_tokenizers(plan)
    [store] = build(plan, *tokenizers)
    (tmp_path / "there").mkdir()
    moved = recipe(tmp_path / "there")  # the same lines in another folder
    os.utime(tmp_path / "there" / "a.tsv", ns=(5, 5))
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "elsewhere"))
    shutil.copytree(cache, tmp_path / "elsewhere" / "tokens")

    def no_progress(name, pairs):
        raise AssertionError("tokenized again")

    assert build(moved, *tokenizers, no_progress)[0].digest == store.digest


LINES = [f"a b{n % 7} c {n}\tx {n} y{n % 5}" for n in range(1000)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pairs": None, "text": "a.tsv", "documents": "line", "format": "text"},
        {"pairs": None, "text": "a.tsv", "documents": "stream", "format": "text"},
    ],
    ids=["pairs", "documents", "stream"],
)
def test_several_processes_write_the_same_bytes_as_one(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(module, "BLOCK_PAIRS", 37)
    text = {"unit": "bpe", "vocabulary": 300}
    model = {} if "text" not in settings else {"family": "gpt"}
    data = {"folder": str(tmp_path), "pairs": "a.tsv", "max_length": 12, **settings}
    (tmp_path / "a.tsv").write_text("\n".join(LINES) + "\n\t\n")
    plan = Recipe.model_validate({"data": data, "text": text, "model": model})
    tokenizers = learn_tokenizers(plan)

    def written(processes):
        monkeypatch.setenv("REGARD_CACHE", str(tmp_path / str(processes)))
        monkeypatch.setattr(workers, "usable_cores", lambda: processes)
        processes_seen = {os.getpid()}
        real = CorpusEncoder.encode_block

        def encode_block(job, block):
            found = real(job, block)
            return replace(found, counts={**found.counts, f"process {os.getpid()}": 1})

        monkeypatch.setattr(CorpusEncoder, "encode_block", encode_block)
        counted = []
        monkeypatch.setattr(module, "Counter", lambda: counted.append(Counter()) or counted[-1])
        build(plan, *tokenizers)
        monkeypatch.setattr(CorpusEncoder, "encode_block", real)
        processes_seen |= {int(key.split()[1]) for key in counted[0] if key.startswith("process ")}
        [folder] = (tmp_path / str(processes) / "tokens").iterdir()
        return {file.name: file.read_bytes() for file in folder.iterdir()}, len(processes_seen)

    (one, alone), (several, shared) = written(1), written(3)
    assert alone == 1 and shared > 1
    assert one == several and len(one) == 5


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    plan = recipe(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write the tokens of a.tsv to .*REGARD_CACHE"):
        made(plan)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(tmp_path, monkeypatch, cache):
    real = open
    monkeypatch.setattr(
        token_files,
        "open",
        lambda path, *how, **more: real("/dev/full" if path.name == "target.ids" else path, *how, **more),
        raising=False,
    )
    with pytest.raises(UserError, match="No space left"):
        made(recipe(tmp_path))
    assert list(cache.iterdir()) == []


def test_the_location_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("REGARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "regard" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "regard" / "tokens"


def test_the_layout_is_plain(tmp_path, cache):
    made(recipe(tmp_path))
    [folder] = cache.iterdir()
    names = ["about.json", "source.ids", "source.offsets", "target.ids", "target.offsets"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert np.fromfile(folder / "source.offsets", np.int64).tolist() == [0, 3]
    assert json.loads((folder / "about.json").read_text())["report"]["pairs"] == 1


def test_the_sample_for_the_vocabulary_does_not_depend_on_the_seed(tmp_path):
    """So that runs with several seeds can form an ensemble."""
    lines = "".join(f"s{n}\tt{n}\n" for n in range(200))

    def words(seed):
        plan = recipe(tmp_path, lines, {"unit": "word", "sample": 20, "shared": False})
        plan = plan.model_copy(update={"training": plan.training.model_copy(update={"seed": seed})})
        return [sorted(tokenizer.words) for tokenizer in learn_tokenizers(plan)]

    sources, targets = words(1)
    assert len(sources) == 20 and [word[1:] for word in sources] == [word[1:] for word in targets]
    assert words(1) == [sources, targets] == words(2)
    assert any(int(word[1:]) >= 100 for word in sources), "not only the beginning of the file"


def test_every_pair_is_equally_likely_in_the_sample():
    # 4000 draws of 2 from 8: each is kept with probability 1/4, standard deviation of a count 27
    counts = np.zeros(8)
    for seed in range(4000):
        for source, _ in sample(((str(n), "") for n in range(8)), 2, seed):
            counts[int(source)] += 1
    assert abs(counts - 1000).max() < 5 * 27


def test_large_arrays_are_in_several_files(tmp_path, cache, monkeypatch):
    """Which hold the same tokens, are verified, and can be empty."""
    plan = recipe(tmp_path, "".join(f"{'a ' * (n % 7)}b\tc{' d' * (n % 5)}\n" for n in range(60)))
    [whole], _ = made(plan)
    shutil.rmtree(cache)
    monkeypatch.setattr(token_files, "FILE_BYTES", 64)  # 32 tokens, 8 offsets
    [store], read = made(plan)
    assert read and len(list(cache.glob("*/source.ids*"))) == -(-len(whole.source.ids) // 32) > 3
    assert len(list(cache.glob("*/target.offsets*"))) == 8  # 61 offsets
    assert store.report == whole.report and len(store) == 60
    for side, other in ((store.source, whole.source), (store.target, whole.target)):
        assert lists(side) == lists(other) and side.lengths().tolist() == other.lengths().tolist()
        chosen = np.array([59, 3, 3, 30])
        assert side.gather(chosen).tolist() == other.gather(chosen).tolist()
        assert np.asarray(side.ids).tolist() == other.ids.tolist() and side.ids.dtype == other.ids.dtype
        assert side.offsets[-1] == other.offsets[-1] and side.ids[[[0, 40]]].tolist() == other.ids[[[0, 40]]].tolist()
    assert not made(plan)[1]  # found
    (file,) = cache.glob("*/source.ids.2")
    file.write_bytes(bytes(64))
    assert made(plan)[1]  # built again
    (file,) = cache.glob("*/source.ids.2")
    file.unlink()
    assert made(plan)[1]


def test_gathering_equals_slicing():
    ragged = Ragged.of([[5, 6, 2], [2], [7, 8, 9, 2], [4, 2]])
    for which in ([2, 0], [1], [3, 3, 1, 0, 2], []):
        expected = [token for index in which for token in ragged[index].tolist()]
        assert ragged.gather(np.array(which, int)).tolist() == expected
    assert ragged.lengths().tolist() == [3, 1, 4, 2]
    assert TokenStore.of([[5, 2]], [[6, 7, 2]]).report == CorpusReport(1, 0, 0, 2, 3)


def test_a_built_in_corpus_is_cached_too():
    plan = Recipe.model_validate({"data": {"corpus": "copy", "count": 50}, "text": {"unit": "word"}})
    [store], _ = made(plan)
    assert len(store) == 50 and lists(store.source) == lists(store.target)
    assert made(plan)[1] == []
