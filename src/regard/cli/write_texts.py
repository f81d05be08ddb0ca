"""What `regard caption` and `regard transcribe` have in common: files in, one line of text out for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from regard.cli import decoders, options
from regard.cli.output import text_output, written
from regard.cli.progress import progress_bar
from regard.errors import UserError
from regard.runs import LoadedRun
from regard.tasks.translator import Answer

CHUNK = 256  # inputs that are read and decoded together


def write_texts(
    loaded: LoadedRun,
    files: Sequence[str],
    settings: dict[str, object],
    nbest: int = 1,
    form: options.OutputFormat = options.OutputFormat.TEXT,
    output: Path | None = None,
    quiet: bool = False,
) -> None:
    """Write the text of each input, as a line: on standard output, or to a file."""
    for name in files:
        options.check_utf8(INPUT=name)
    if not files:
        raise UserError(f"nothing to read: give files, as in regard {loaded.task.verb} RUN {loaded.task.usage}")
    if nbest > 1:
        settings = {"beam": max(nbest, loaded.recipe.decoding.beam), **settings}
    lines = _lines(loaded, files, settings, nbest, form, quiet)
    if output is not None:
        with written(output) as out:
            out.writelines(f"{line}\n" for line in lines)
        return
    stream = text_output()
    for line in lines:
        stream.write(f"{line}\n")
        stream.flush()


def _lines(
    loaded: LoadedRun,
    files: Sequence[str],
    settings: dict[str, object],
    nbest: int,
    form: options.OutputFormat,
    quiet: bool,
) -> Iterator[str]:
    task, write = loaded.feature_task(), decoders.writer(loaded, settings)
    with progress_bar("reading", len(files), quiet or len(files) < CHUNK) as progress:
        for begin in range(0, len(files), CHUNK):
            names = files[begin : begin + CHUNK]
            features = [task.features(task.read_argument(name)) for name in names]
            for name, answer in zip(names, write(features, nbest=nbest, first=begin, progress=progress), strict=True):
                yield _json(name, answer) if form is options.OutputFormat.JSONL else _plain(answer, nbest)


def _plain(answer: Answer, nbest: int) -> str:
    if nbest == 1:
        return answer.texts[0]
    scored = zip(answer.hypotheses, answer.texts, strict=True)
    return "\n".join(f"{hypothesis.score:.4f}\t{text}" for hypothesis, text in scored)


def _json(name: str, answer: Answer) -> str:
    scores = [round(hypothesis.score, 6) for hypothesis in answer.hypotheses]
    entry: dict[str, Any] = {"input": name, "text": answer.texts[0], "score": scores[0] if scores else None}
    if len(answer.texts) > 1:
        entry["alternatives"] = [
            {"text": text, "score": score} for text, score in zip(answer.texts, scores, strict=True)
        ]
    return json.dumps(entry, ensure_ascii=False)
