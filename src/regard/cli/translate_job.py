"""Lines of output for lines of input, as `regard translate` writes them, and where it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard import __version__, tensor_io
from regard.cli.inputs import Chunk, Input, InputLine
from regard.cli.options import OutputFormat
from regard.cli.output import TextOutput, note, text_output, written
from regard.cli.partial import partial_output
from regard.cli.progress import progress_bar
from regard.runs import LoadedRun
from regard.tasks.confidence import Confidence
from regard.tasks.documents import Align, translate_documents
from regard.tasks.translator import Answer, Translator


@dataclass(frozen=True)
class TranslateJob:
    """Turns chunks of input lines into lines of output."""

    translator: Translator
    form: OutputFormat
    nbest: int
    prefix: str | None
    quiet: bool
    confidence_of: Callable[[Answer], Confidence] | None = None  # None: no confidences

    def translate(self, chunk: Chunk, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """Yield the lines of output for a chunk of input; `progress` is called with the number of lines done."""
        texts = chunk.texts
        prefixes = None if self.prefix is None else [self.prefix] * len(texts)
        if not self.quiet:
            chunk.warn()
        answers = self.translator(texts, nbest=self.nbest, first=chunk.first, prefixes=prefixes, progress=progress)
        if progress is not None:
            progress(sum(not text.strip() for text in texts))  # blank lines, which the translator does not count
        for number, (line, answer) in enumerate(zip(chunk.lines, answers, strict=True), chunk.first + 1):
            if answer.truncated and not self.quiet:
                limit = self.translator.budget.source
                note(f"regard: warning: line {number} has more than {limit} tokens and was truncated")
            for requirement in () if self.quiet else answer.unmet:
                note(f"regard: warning: line {number}: {requirement}")
            yield from self._lines(line, answer)

    def _lines(self, line: InputLine, answer: Answer) -> Iterator[str]:
        """Format the translations of one line."""
        scores = [round(hypothesis.score, 4) for hypothesis in answer.hypotheses] or [0.0]
        if self.form is OutputFormat.JSONL:
            nbest = [{"text": text, "score": score} for text, score in zip(answer.texts, scores, strict=True)]
            entry: dict[str, object] = {"source": line.text, **nbest[0], "truncated": answer.truncated}
            if line.error is not None:
                entry["error"] = line.error
            if self.confidence_of is not None:
                entry.update(_confidence_fields(self.confidence_of(answer)))
            if self.translator.glossary is not None:
                entry["unmet"] = [str(requirement) for requirement in answer.unmet]
            if self.nbest > 1:
                entry["nbest"] = nbest
            yield json.dumps(entry, ensure_ascii=False)
        elif self.nbest == 1:
            yield answer.texts[0]
        else:
            lines = [f"{score:.4f}\t{text}" for text, score in zip(answer.texts, scores, strict=True)]
            yield from lines + [""] * (self.nbest - len(lines))  # the same number for every line of input


@dataclass(frozen=True, kw_only=True)
class MarkupJob(TranslateJob):
    """Translates lines of HTML."""

    align: Align

    def translate(self, chunk: Chunk, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """Yield the lines of output for a chunk of input."""
        if not self.quiet:
            chunk.warn()
        documents = translate_documents(self.translator, self.align, chunk.texts, format="html", prefix=self.prefix)
        if progress is not None:
            progress(len(documents))
        for number, translated in enumerate(documents, chunk.first + 1):
            unmet = [requirement for answer in translated.answers for requirement in answer.unmet]
            for requirement in () if self.quiet else unmet:
                note(f"regard: warning: line {number}: {requirement}")
            yield translated.texts[0]


def _confidence_fields(confidence: Confidence) -> dict[str, object]:
    words = [{"text": word.text, "confidence": round(word.confidence, 4)} for word in confidence.words]
    return {"confidence": round(confidence.sentence, 4), "calibrated": confidence.calibrated, "words": words}


def write_translations(job: TranslateJob, source: Input, output: Path | None, model: LoadedRun, resume: bool) -> None:
    """Translate all lines to standard output (None), a device or a pipe, or a file; `resume` continues a file."""
    if output is None:
        _write_as_they_come(job, source, text_output())
    elif output.exists() and not output.is_file() and not output.is_dir():
        with written(output) as out:  # a device or a pipe
            _write_as_they_come(job, source, out)
    else:
        _write_file(job, source, output, _settings(job, model), resume)


def _write_as_they_come(job: TranslateJob, source: Input, out: TextOutput) -> None:
    for chunk in source.chunks():
        for line in job.translate(chunk):
            out.write(line + "\n")
        out.flush()


def _write_file(job: TranslateJob, source: Input, path: Path, settings: dict[str, Any], resume: bool) -> None:
    with partial_output(path, settings, resume) as out:
        if out.lines:
            out.skip(line.text for line in source.skip(out.lines))
            if not job.quiet:
                note(f"resuming after line {out.lines:,}")
        quiet = job.quiet or source.interactive
        with progress_bar("translating", source.count, quiet, done=source.done) as progress:
            for chunk in source.chunks():
                out.write((line.text for line in chunk.lines), list(job.translate(chunk, progress)))


def _settings(job: TranslateJob, model: LoadedRun) -> dict[str, Any]:
    """Everything that the output depends on, apart from the input."""
    translator = job.translator
    return {
        "version": __version__,
        "weights": tensor_io.digest(tensor_io.model_tensors(model.module)),
        "device": model.device.type,
        "precision": model.precision,
        **translator.settings.model_dump(),
        "seed": translator.seed,
        "source_tag": translator.source_tag,
        "target_tag": translator.target_tag,
        "prefix": job.prefix,
        "nbest": job.nbest,
        "format": str(job.form),
        "confidence": job.confidence_of is not None,
        "markup": isinstance(job, MarkupJob),
        "glossary": [] if translator.glossary is None else [asdict(entry) for entry in translator.glossary.entries],
    }
