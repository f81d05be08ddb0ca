"""regard evaluate, for speech"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from regard.cli import decoders
from regard.cli.output import written
from regard.cli.progress import progress_bar
from regard.metrics.error_rates import ErrorRates
from regard.metrics.text_scores import score_texts
from regard.runs import LoadedRun
from regard.tasks.speech import SpeechTask

BLEU_ORDER = 4  # words of the longest n-grams of BLEU: it is 0 for single words


def evaluate_speech(
    loaded: LoadedRun, examples: list[Any], changes: dict[str, Any], save: Path | None, as_json: bool, quiet: bool
) -> None:
    """Print the error rates of transcripts of held-out recordings; for sentences also BLEU and chrF."""
    task = loaded.task
    assert isinstance(task, SpeechTask)
    write = decoders.writer(loaded, changes)
    with progress_bar("transcribing", len(examples), quiet) as progress:
        answers = task.write(write, [given for given, _ in examples], progress=progress)
    outputs, references = [answer.texts[0] for answer in answers], [text for _, text in examples]
    if save is not None:
        with written(save) as out:
            out.writelines(line + "\n" for line in outputs)
    rates, scores = ErrorRates.of(outputs, references), score_texts(outputs, references)
    words = rates.words
    if as_json:
        entry = {"recordings": rates.texts, "words": words.length, "wer": rates.wer, "cer": rates.cer}
        entry |= {"substitutions": words.substitutions, "deletions": words.deletions, "insertions": words.insertions}
        entry |= {"exact": rates.accuracy, "bleu": scores.bleu, "chrf": scores.chrf}
        typer.echo(json.dumps(entry))
        return
    edits = f"{words.substitutions} substituted, {words.deletions} deleted, {words.insertions} inserted"
    typer.echo(f"WER    {rates.wer:6.2f} %  of {words.length:,} words: {edits}")
    typer.echo(f"CER    {rates.cer:6.2f} %  of {rates.characters.length:,} characters")
    typer.echo(f"exact  {rates.accuracy:6.2f} %  of {rates.texts:,} recordings")
    if any(len(text.split()) >= BLEU_ORDER for text in references):
        typer.echo(f"BLEU   {scores.bleu:6.2f}    {scores.bleu_signature}")
        typer.echo(f"chrF   {scores.chrf:6.2f}    {scores.chrf_signature}")
