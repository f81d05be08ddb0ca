"""regard transcribe"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import options
from regard.cli.write_texts import write_texts
from regard.data.audio import SUFFIXES, Samples
from regard.data.speech import Recording
from regard.errors import UserError
from regard.runs import LoadedRun
from regard.tasks.speech import SpeechTask
from regard.tasks.translator import Answer


class SpokenTask(StrEnum):
    """What an imported Whisper model writes: a transcript, or an English translation."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


def transcribe(
    run: options.RunPath,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Sound files (WAV, FLAC, OGG, MP3), folders of them, or held-out examples such as 'test 3'.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file. [default: standard output]"),
    ] = None,
    beam: options.Beam = None,
    nbest: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --format jsonl: the N best texts of each recording.")
    ] = 1,
    language: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="Imported Whisper models: language of the recordings. [default: detected]"),
    ] = None,
    task: Annotated[
        SpokenTask | None,
        typer.Option(help="Imported Whisper models: write what is said, or translate it into English."),
    ] = None,
    form: options.Format = options.OutputFormat.TEXT,
    weights: options.Weights = "best",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Write what is said in recordings, with a speech model.

    Prints a line for each recording, in the order given; those of a folder are sorted by name. If there are several,
    each line begins with the name of its file and a tab. Sounds of another sample rate are resampled, and the channels
    of stereo ones averaged. Imported Whisper models read 30 seconds at once: longer recordings are cut at pauses.

    Examples:

        regard transcribe runs/digits seven.wav

        regard transcribe runs/digits recordings/ -o texts.tsv

        regard transcribe runs/whisper interview.mp3 --language de --task translate
    """
    if nbest > 1 and form is not options.OutputFormat.JSONL:
        raise UserError("--nbest needs --format jsonl")
    loaded = LoadedRun.load(run, weights=weights, device=device, precision=precision)
    loaded.require_verb("transcribe")
    speech = loaded.feature_task()
    assert isinstance(speech, SpeechTask)
    if nbest > (beam or loaded.recipe.decoding.beam):
        raise UserError(f"--nbest {nbest} needs --beam of at least {nbest}")
    names = [str(found) for path in files for found in sound_files(path)]

    def line_of(name: str, samples: Samples, answer: Answer) -> str:
        if form is options.OutputFormat.JSONL:
            language = speech.language_of(loaded.tokenizers[1], answer)
            return _json(name, len(samples) / speech.settings.sample_rate, answer, language)
        return answer.texts[0] if len(names) == 1 else f"{name}\t{answer.texts[0]}"

    settings = options.changed(beam=beam, language=language, task=None if task is None else task.value)

    def read(name: str) -> Samples:
        given = speech.read_argument(name)
        return given.samples(speech.settings.sample_rate) if isinstance(given, Recording) else given

    write_texts(loaded, names, settings, read=read, line_of=line_of, nbest=nbest, output=output, quiet=quiet)


def sound_files(path: Path) -> list[Path]:
    """The file itself, or the sound files of a folder, by name."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"{path} has no sound files (their names end in {', '.join(SUFFIXES)})")
    return found


def _json(name: str, seconds: float, answer: Answer, language: str | None) -> str:
    found = zip(answer.texts, answer.hypotheses, strict=True)
    best = [{"text": text, "score": round(hypothesis.score, 6)} for text, hypothesis in found]
    entry: dict[str, Any] = {"file": name, "seconds": round(seconds, 3), **best[0]}
    entry |= {} if language is None else {"language": language}
    return json.dumps(entry | ({"nbest": best} if len(best) > 1 else {}), ensure_ascii=False)
