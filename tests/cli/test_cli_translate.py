"""regard translate: one line of output for each line of input, files, --resume, signals, ensembles."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

LETTERS = list("abcdefghijklmnopqrst")


def _sentences(count: int) -> list[str]:
    return [" ".join(LETTERS[(n * 7 + i * (n % 5 + 1)) % 20] for i in range(n % 4 + 1)) for n in range(count)]


@pytest.fixture
def translate(regard, trained, tmp_path):
    """Translate a file with this content; return the lines of output."""

    def call(content: bytes, *words: object, name: str = "in.txt") -> list[str]:
        (tmp_path / name).write_bytes(content)
        result = regard("translate", trained, "--input", tmp_path / name, *words)
        assert result.status == 0, result.err
        assert result.out == "" or result.out.endswith("\n")
        return result.out.split("\n")[:-1]

    return call


@pytest.fixture
def alone(regard, trained):
    """The translation of one sentence by itself."""
    return lambda text, *words: regard("translate", trained, text, *words).out.removesuffix("\n")


AWKWARD = {
    "nothing": (b"", []),
    "one blank line": (b"\n", [""]),
    "no newline at the end": (b"a b\nc", ["a b", "c"]),
    "blank lines": (b"\n\na b\n\n", ["", "", "a b", ""]),
    "blanks": (b"  \n\t\na b\n\xc2\xa0\n", ["", "", "a b", ""]),
    "unknown symbols": ("a b\nzzz ☃\n\U0001f600\n".encode(), ["a b", "zzz ☃", "\U0001f600"]),
    "carriage returns": (b"a b\r\n\r\nc\r\n", ["a b", "", "c"]),
    "a carriage return inside": (b"a\rb\nc\n", ["a\rb", "c"]),
    "byte-order mark": (b"\xef\xbb\xbfa b\nc\n", ["a b", "c"]),
    "other line breaks": ("a\u2028b\n\x0c\na\x85b\x1eb\n".encode(), ["a\u2028b", "", "a\x85b\x1eb"]),
    "null bytes": (b"a\x00b\n\x00\nc\n", ["a\x00b", "\x00", "c"]),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_lines_in_are_lines_out(translate, alone, case):
    content, lines = AWKWARD[case]
    assert translate(content) == [alone(line) if line else "" for line in lines]


def test_three_thousand_lines(translate, alone):
    lines = _sentences(3000)
    lines[100] = lines[2999] = ""
    out = translate("\n".join(lines).encode() + b"\n", "--beam", 1)
    assert len(out) == 3000
    assert out[100] == out[2999] == ""
    assert [out[n] for n in (0, 1, 2500)] == [alone(lines[n], "--beam", 1) for n in (0, 1, 2500)]


def test_a_line_that_is_too_long_is_truncated_with_a_warning(regard, trained, tmp_path, alone):
    long = "a b " * 30
    (tmp_path / "in.txt").write_text(f"a\n\n{long}\nb\n")
    result = regard("translate", trained, "--input", tmp_path / "in.txt")
    assert result.err == "regard: warning: line 3 has more than 40 tokens and was truncated\n"
    assert result.out.splitlines() == [alone("a"), "", alone(" ".join(long.split()[:39])), alone("b")]
    quiet = regard("translate", trained, "--input", tmp_path / "in.txt", "--quiet")
    assert (quiet.out, quiet.err) == (result.out, "")
    assert "truncated" in regard("draw", trained, long).err


def test_the_output_does_not_depend_on_the_batch(translate, regard, trained, copied):
    lines = _sentences(40)
    content = "".join(line + "\n" for line in lines).encode()
    recipe = copied / "recipe.toml"
    text = recipe.read_text()
    assert "batch_tokens = 4096" in text
    recipe.write_text(text.replace("batch_tokens = 4096", "batch_tokens = 9"))
    for words in ([], ["--sample", "--seed", "3"]):
        out = translate(content, *words)
        assert regard("translate", copied, *lines, *words).out.splitlines() == out
        assert regard("translate", trained, *lines, *words).out.splitlines() == out


def test_compressed_files(translate, alone):
    expected = [alone("a b"), alone("c")]
    assert translate(gzip.compress(b"a b\nc\n"), name="in.txt.gz") == expected
    assert translate(lzma.compress(b"a b\nc\n"), name="in.txt.xz") == expected


def test_output_is_whole_or_not_there(translate, regard, trained, tmp_path, alone):
    out = tmp_path / "deep" / "out.txt"
    assert translate(b"a b\n\nc\n", "--output", out) == []
    assert out.read_bytes() == f"{alone('a b')}\n\n{alone('c')}\n".encode()
    before = out.read_bytes()
    (tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    assert "line 2" in regard("translate", trained, "--input", tmp_path / "bad.txt", "--output", out).error
    assert out.read_bytes() == before
    assert [file.name for file in out.parent.iterdir()] == ["out.txt"]


BAD = b"a b\n\xffc\n\nd\n"  # the second line is not UTF-8


def test_bad_bytes_of_standard_input_are_replaced_and_named(typed, trained, alone):
    result = typed(BAD, "translate", trained)
    assert result.status == 0
    assert result.out.split("\n") == [alone("a b"), alone("\ufffdc"), "", alone("d"), ""]
    warning = "line 2: not valid UTF-8 (byte 1 of the line); the bytes were replaced by U+FFFD"
    assert result.err == f"regard: warning: {warning}\n"
    assert typed(BAD, "translate", trained, "--quiet").err == ""
    entries = [json.loads(line) for line in typed(BAD, "translate", trained, "--format", "jsonl").out.splitlines()]
    assert [entry.get("error") for entry in entries] == [None, "not valid UTF-8 (byte 1 of the line)", None, None]
    assert entries[1]["source"] == "\ufffdc" and entries[1]["text"] == alone("\ufffdc")


def test_bad_lines_can_be_skipped_or_refused(typed, regard, trained, alone, tmp_path):
    result = typed(BAD, "translate", trained, "--errors", "skip")
    assert result.out.split("\n") == [alone("a b"), "", "", alone("d"), ""] and "line 2" in result.err
    entry = json.loads(typed(BAD, "translate", trained, "--errors", "skip", "--format", "jsonl").out.split("\n")[1])
    assert entry["text"] == "" and "UTF-8" in entry["error"]
    assert "standard input, line 2" in typed(BAD, "translate", trained, "--errors", "stop").err
    assert "stdin, line 2" in regard("translate", trained, "-i", tmp_path / "stdin").error  # a file: the default
    assert regard("translate", trained, "-i", tmp_path / "stdin", "--errors", "replace").out.count("\n") == 4


def test_chunks_of_a_file_depend_on_the_file_alone(trained, tmp_path, monkeypatch, regard):
    """The same lines are translated together, however slowly the input arrives."""
    import regard.tasks.translator as decoding

    (tmp_path / "in.txt").write_bytes("\n".join(_sentences(5000)).encode())
    sizes, translate = [], decoding.Translator.__call__

    def noted(self, lines, **more):
        sizes.append(len(lines))
        return translate(self, ["" for _ in lines], **more)

    monkeypatch.setattr(decoding.Translator, "__call__", noted)
    assert regard("translate", trained, "-i", tmp_path / "in.txt").out == "\n" * 5000
    with open(tmp_path / "in.txt") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert regard("translate", trained).out == "\n" * 5000
    assert sizes == [2048, 2048, 904] * 2


# -- interrupted and resumed -------------------------------------------------------------------------------------------


@pytest.fixture
def stops(monkeypatch):
    """Raise an error or a signal when a line is translated; chunks are three lines long."""
    import regard.tasks.translator as decoding

    monkeypatch.setattr("regard.cli.inputs.CHUNK_LINES", 3)
    translate = decoding.Translator.__call__

    def call(number: int, error: BaseException | signal.Signals) -> None:
        def stopping(self, lines, *, first=0, **more):
            if first <= number < first + len(lines):
                monkeypatch.setattr(decoding.Translator, "__call__", translate)
                if isinstance(error, signal.Signals):
                    signal.raise_signal(error)
                else:
                    raise error
            return translate(self, lines, first=first, **more)

        monkeypatch.setattr(decoding.Translator, "__call__", stopping)

    return call


@pytest.mark.parametrize("words", [[], ["--nbest", 2], ["--format", "jsonl"], ["--sample"]])
def test_an_interrupted_output_is_resumed(regard, trained, tmp_path, stops, words):
    source, out, part = tmp_path / "in.txt", tmp_path / "out.txt", tmp_path / "out.txt.part"
    source.write_text("\n".join([*_sentences(5), "", *_sentences(4)]))
    whole = regard("translate", trained, "-i", source, *words).out
    command = ["translate", trained, "-i", source, "-o", out, *words]
    stops(7, KeyboardInterrupt())
    stopped = regard(*command)
    assert stopped.status == 130 and not out.exists()
    last = f"{part} has the output of 6 lines: the same command with --resume continues it"
    assert stopped.err.splitlines()[-1] == f"regard: stopped; {last}"
    assert part.read_text() == "".join(line + "\n" for line in whole.splitlines()[: 12 if "--nbest" in words else 6])
    with open(part, "a") as file:
        file.write("a torn li")  # what a crash may leave
    resumed = regard(*command, "--resume")
    assert resumed.status == 0 and "resuming after line 6" in resumed.err
    assert out.read_text() == whole
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_a_part_with_other_settings_or_input_is_not_resumed(regard, trained, tmp_path, stops):
    source, out, part = tmp_path / "in.txt", tmp_path / "out.txt", tmp_path / "out.txt.part"
    source.write_text("\n".join(_sentences(10)))
    command = ["translate", trained, "-i", source, "-o", out, "--quiet"]
    stops(7, KeyboardInterrupt())
    regard(*command)
    held = part.read_bytes()
    assert "(beam was 2 and is now 3)" in regard(*command, "--resume", "--beam", 3).error
    assert "(nbest was 1 and is now 2)" in regard(*command, "--resume", "--nbest", 2).error
    source.write_text("\n".join(["q", *_sentences(10)[1:]]))
    assert "written from other input" in regard(*command, "--resume").error
    source.write_text("\n".join(_sentences(4)))
    assert "written from other input" in regard(*command, "--resume").error
    assert part.read_bytes() == held
    source.write_text("\n".join([*_sentences(6), "later lines may have changed"]))
    assert regard(*command, "--resume").status == 0
    assert out.read_text() == regard("translate", trained, "-i", source).out
    assert "--output" in regard("translate", trained, "-i", source, "--resume").error


def test_without_resume_it_starts_again(regard, trained, tmp_path, stops):
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(_sentences(10)))
    stops(7, OSError(28, "No space left on device"))
    failed = regard("translate", trained, "-i", source, "-o", out)
    assert failed.error.startswith(f"{out} could not be written: the disk is full; {out}.part has the output of 6")
    assert regard("translate", trained, "-i", source, "-o", out, "--beam", 1, "--resume", "-q").status == 2
    assert regard("translate", trained, "-i", source, "-o", out, "--beam", 1).err == ""
    assert out.read_text() == regard("translate", trained, "-i", source, "--beam", 1).out


def test_sigterm_and_sighup_keep_the_part(regard, trained, tmp_path, stops):
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("\n".join(_sentences(10)))
    for name, status in (("SIGTERM", 143), ("SIGHUP", 129)):
        stops(7, signal.Signals[name])
        stopped = regard("translate", trained, "-i", source, "-o", out)
        assert stopped.status == status and "--resume continues it" in stopped.err
        assert signal.getsignal(signal.Signals[name]) is signal.SIG_DFL


def test_a_part_is_written_by_one_process(regard, trained, tmp_path):
    from regard.cli.partial import partial_output

    with partial_output(tmp_path / "out", {}, resume=False) as first:
        assert "another process is writing it" in regard("translate", trained, "a", "-o", tmp_path / "out").error
        first.write(["a"], ["b"])
    assert (tmp_path / "out").read_text() == "b\n"


def test_output_may_overwrite_the_input(regard, trained, tmp_path, alone):
    (tmp_path / "text").write_text("a b\nc\n")
    assert regard("translate", trained, "-i", tmp_path / "text", "-o", tmp_path / "text").status == 0
    assert (tmp_path / "text").read_text().splitlines() == [alone("a b"), alone("c")]


def test_json_lines(translate, alone):
    out = [json.loads(line) for line in translate("a b\n\nzzz ☃\n".encode(), "--format", "jsonl")]
    assert [entry["source"] for entry in out] == ["a b", "", "zzz ☃"]
    assert [entry["text"] for entry in out] == [alone("a b"), "", alone("zzz ☃")]
    assert out[0]["score"] < 0 and out[1]["score"] == 0 and "nbest" not in out[0]
    best = json.loads(translate(b"a b\n", "--format", "jsonl", "--nbest", 3)[0])["nbest"]
    assert len({entry["text"] for entry in best}) == 3
    assert [entry["score"] for entry in best] == sorted((entry["score"] for entry in best), reverse=True)


def test_n_best_lines(regard, trained):
    lines = regard("translate", trained, "a b", "--nbest", 3).out.splitlines()
    scores = [float(line.split("\t")[0]) for line in lines]
    assert len(lines) == 3 and scores == sorted(scores, reverse=True)
    assert lines[0].split("\t")[1] == regard("translate", trained, "a b", "--beam", 3).out.strip()
    both = regard("translate", trained, "a b", "", "a b", "--nbest", 3).out.splitlines()
    assert both == [*lines, "0.0000\t", "", "", *lines]  # as many for every line, also for a blank one
    refused = regard("translate", trained, "a b", "--nbest", 3, "--beam", 2)
    assert refused.status == 2 and "--nbest 3 needs a beam of at least 3, but --beam is 2" in refused.err


def test_nbest_below_the_beam_does_not_narrow_the_beam(regard, copied):
    recipe = copied / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("beam = 2 ", "beam = 5 "))
    first = [regard("translate", copied, s, "--nbest", 2).out.split("\n")[0].split("\t")[1] for s in LETTERS]
    assert first == [regard("translate", copied, s).out.removesuffix("\n") for s in LETTERS]


def test_sampling_depends_on_the_seed_alone(regard, trained):
    def draw(*words):
        return regard("translate", trained, "a b", "c d", "--sample", *words).out

    assert draw("--seed", 1) == draw("--seed", 1)
    assert len({draw("--seed", seed) for seed in range(5)}) > 1
    assert draw("--top-k", 1) == regard("translate", trained, "a b", "c d", "--beam", 1).out


def test_prefix_and_lengths(regard, trained):
    assert regard("translate", trained, "a b", "--prefix", "q r").out.startswith("q r")
    words = regard("translate", trained, "a b", "--no-repeat-ngram", 1).out.split()
    assert len(words) == len(set(words)) > 0


# -- in a process of its own: pipes and signals ------------------------------------------------------------------------


@contextlib.contextmanager
def _ending(process: subprocess.Popen[str], seconds: float = 600) -> Iterator[subprocess.Popen[str]]:
    """Kill a process that hangs, so that the tests do not."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def test_standard_input_is_answered_line_by_line_until_ctrl_c(start, trained, alone):
    with _ending(start("translate", trained)) as process:
        for text in ("a b", "", "c"):
            process.stdin.write(text + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == (alone(text) if text else "") + "\n"
        process.send_signal(signal.SIGINT)  # while it waits for the next line
        assert process.wait() == 130
        assert process.stderr.read() == "regard: stopped\n"


def test_a_closed_pipe_ends_translate_quietly(start, trained):
    """`regard translate RUN | head -1`, with more input still to come."""
    with _ending(start("translate", trained)) as process:
        process.stdin.write("a b\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdout.close()
        process.stdin.write("c\n")
        process.stdin.flush()
        assert process.wait() == 141
        assert process.stderr.read() == ""


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], []])
def test_a_closed_pipe_ends_help_quietly(start, words):
    with _ending(start(*words)) as process:
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == ""


def test_standard_input_in_this_process(regard, trained, tmp_path, monkeypatch, alone):
    (tmp_path / "in.txt").write_bytes("\n".join(_sentences(5000)).encode())
    with open(tmp_path / "in.txt") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        out = regard("translate", trained, "--beam", 1, "--no-repeat-ngram", 1).out.splitlines()
    assert len(out) == 5000
    monkeypatch.setattr("sys.stdin", None)  # `<&-`
    assert regard("translate", trained).out == ""


@pytest.mark.slow
def test_a_killed_translation_is_resumed(start, regard, trained, tmp_path):
    """SIGTERM in the middle, then SIGKILL, which leaves no time to tidy up."""
    source, out, part = tmp_path / "in.txt", tmp_path / "out.txt", tmp_path / "out.txt.part"
    source.write_text("\n".join(_sentences(3 * 2048)))
    command = ["translate", trained, "-i", source, "-o", out, "--beam", 1]
    before = 0
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        with _ending(start(*command, "--resume")) as process:
            while not (part.exists() and part.stat().st_size > before) and process.poll() is None:
                threading.Event().wait(0.01)
            process.send_signal(number)
            assert process.wait() == status
            said = process.stderr.read()
            assert status < 0 or "the same command with --resume continues it" in said
        before = part.stat().st_size
    assert regard(*command, "--resume").status == 0
    assert out.read_text() == regard("translate", trained, "-i", source, "--beam", 1).out


def test_training_stops_on_signals_and_can_be_resumed(start, train_copy, trained, tmp_path):
    """Ctrl-C and SIGTERM save a checkpoint, and the same command resumes."""
    run = tmp_path / "run"
    words = [*train_copy, "--out", run, "--set", "training.steps=1000000", "--set", "training.validate_every=1000000"]
    with _ending(start(*words)) as process:
        while not (run / "metrics.jsonl").exists() and process.poll() is None:
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        *_, last = process.stderr.read().splitlines()
    assert last.startswith("regard: stopped after step ") and "same command" in last
    step = last.split("step ")[1].split(";")[0]
    with _ending(start(*words)) as process:
        news = []
        for line in process.stderr:
            news.append(line)
            if line.startswith("resuming"):
                break
        assert f"resuming after step {int(step):,} of 1,000,000\n" == news[-1]
        threading.Event().wait(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        *_, last = process.stderr.read().splitlines()
    assert last.startswith("regard: stopped after step ") and int(last.split("step ")[1].split(";")[0]) >= int(step)
    assert not [name for name in os.listdir(run) if name.endswith(".tmp")]


def test_with_decodes_with_an_ensemble(regard, trained, train_copy, tmp_path):
    """Two equal runs give the output of one; another run changes the scores."""
    other = tmp_path / "other"
    assert regard(*train_copy, "--set", "training.seed=2", "--quiet", "--out", other).status == 0
    alone = [json.loads(regard("translate", run, "--format", "jsonl", "a b c").out) for run in (trained, other)]
    both = json.loads(regard("translate", trained, "--with", other, "--format", "jsonl", "a b c").out)
    assert both["score"] not in [said["score"] for said in alone]
    twice = regard("translate", trained, "--with", trained, *_sentences(5)).out
    assert twice == regard("translate", trained, *_sentences(5)).out
    scored = json.loads(regard("evaluate", trained, "--with", other, "--json", "--quiet").out)
    singly = json.loads(regard("evaluate", trained, "--json", "--quiet").out)
    assert scored["perplexity"] != singly["perplexity"]


def test_runs_that_cannot_form_an_ensemble_are_refused(regard, trained, tmp_path):
    assert "does not exist" in regard("translate", trained, "--with", tmp_path / "nowhere", "a").error
    files = "--outputs", tmp_path / "out.txt", "--reference", tmp_path / "out.txt"
    assert "--with has no effect" in regard("evaluate", *files, "--with", trained).error
