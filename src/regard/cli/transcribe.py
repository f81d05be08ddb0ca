"""regard transcribe"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import decoders, options
from regard.cli.output import text_output, written
from regard.cli.progress import progress_bar
from regard.data.audio import SUFFIXES
from regard.errors import UserError
from regard.runs import LoadedRun
from regard.tasks.speech import SpeechTask
from regard.tasks.translator import Answer

CHUNK = 64  # recordings read at a time


def transcribe(
    run: options.RunPath,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="Sound files (WAV, FLAC, OGG, MP3), or folders of them.", show_default=False
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
    of stereo ones averaged.

    Examples:

        regard transcribe runs/digits seven.wav

        regard transcribe runs/digits recordings/ -o texts.tsv
    """
    if nbest > 1 and form is not options.OutputFormat.JSONL:
        raise UserError("--nbest needs --format jsonl")
    loaded = LoadedRun.load(run, weights=weights, device=device, precision=precision)
    loaded.require_verb("transcribe")
    paths = [found for path in files for found in sound_files(path)]
    changes = options.changed(beam=beam)
    if nbest > (beam or loaded.recipe.decoding.beam):
        raise UserError(f"--nbest {nbest} needs --beam of at least {nbest}")
    lines = _lines(loaded, paths, nbest, form, changes, quiet)
    if output is not None:
        with written(output) as out:
            out.writelines(line + "\n" for line in lines)
        return
    out_stream = text_output()
    for line in lines:
        out_stream.write(line + "\n")
        out_stream.flush()


def sound_files(path: Path) -> list[Path]:
    """The file itself, or the sound files of a folder, by name."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"{path} has no sound files (their names end in {', '.join(SUFFIXES)})")
    return found


def _lines(
    loaded: LoadedRun, paths: list[Path], nbest: int, form: options.OutputFormat, changes: dict[str, Any], quiet: bool
) -> Iterator[str]:
    """The lines of output, in the order of the files."""
    task = loaded.task
    assert isinstance(task, SpeechTask)
    write = decoders.writer(loaded, changes)
    with progress_bar("transcribing", len(paths), quiet or len(paths) < CHUNK) as progress:
        for begin in range(0, len(paths), CHUNK):
            chunk = paths[begin : begin + CHUNK]
            sounds = [task.read_input(str(path)) for path in chunk]
            answers = write([task.features(sound) for sound in sounds], nbest=nbest, progress=progress)
            for path, sound, answer in zip(chunk, sounds, answers, strict=True):
                if form is options.OutputFormat.JSONL:
                    yield _json(path, len(sound) / task.settings.sample_rate, answer)
                else:
                    yield answer.texts[0] if len(paths) == 1 else f"{path}\t{answer.texts[0]}"


def _json(path: Path, seconds: float, answer: Answer) -> str:
    found = zip(answer.texts, answer.hypotheses, strict=True)
    best = [{"text": text, "score": round(hypothesis.score, 6)} for text, hypothesis in found]
    entry: dict[str, Any] = {"file": str(path), "seconds": round(seconds, 3), **best[0]}
    return json.dumps(entry | ({"nbest": best} if len(best) > 1 else {}), ensure_ascii=False)
