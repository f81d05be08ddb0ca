"""What `regard evaluate` does with a run that was trained on plain text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from regard import accelerate, devices
from regard.cli.progress import counted
from regard.data.corpora import held_out
from regard.errors import UserError
from regard.metrics.masked_lm import masked_lm_score
from regard.metrics.perplexity import text_perplexity
from regard.recipes.schema import BertSettings, DataSettings
from regard.run_dir import RunDir


def evaluate_text(
    run: RunDir,
    data: DataSettings,
    split: str,
    text: Path | None,
    stride: int | None,
    weights: str,
    device: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Perplexity of held-out text (or of a file), or, where the model fills in gaps, how well it does that."""
    documents = _documents(data, split, text)
    if isinstance(run.recipe.model, BertSettings):
        _gaps(run, run.recipe.model, documents, stride, weights, device, as_json, quiet)
    else:
        _perplexity(run, documents, stride, weights, device, as_json, quiet)


def _documents(data: DataSettings, split: str, text: Path | None) -> list[str]:
    if text is not None:
        data, split = data.model_copy(update={"test": [str(text)], "folder": None}), "test"
    return [document for _, document in held_out(data, split)]


def _perplexity(
    run: RunDir, documents: list[str], stride: int | None, weights: str, device: str, as_json: bool, quiet: bool
) -> None:
    context, place = run.recipe.model.max_positions, devices.pick(device)
    moved = max(context // 2, 1) if stride is None else stride
    model = run.model(place, weights)
    accelerate.for_inference(model)
    with counted("reading", None, quiet) as progress:
        score = text_perplexity(
            model,
            run.tokenizers[1],
            documents,
            context=context,
            stride=moved,
            stream=run.recipe.data.documents == "stream",
            device=place,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps({**asdict(score), "context": context, "stride": moved}))
        return
    typer.echo(f"perplexity     {score.perplexity:8.3f}   a token of this run's vocabulary")
    typer.echo(f"loss           {score.loss:8.4f}   nats a token")
    if score.bits_per_byte is None:
        typer.echo(f"bits per byte         -   {score.unknown:,} words are not in the vocabulary")
    else:
        typer.echo(f"bits per byte  {score.bits_per_byte:8.4f}   of {score.bytes:,} bytes, whatever the vocabulary")
    typer.echo(f"{score.tokens:,} tokens, each seen once, in windows of {context} moved by {moved}")


def _gaps(
    run: RunDir,
    settings: BertSettings,
    documents: list[str],
    stride: int | None,
    weights: str,
    device: str,
    as_json: bool,
    quiet: bool,
) -> None:
    if stride is not None:
        raise UserError("--stride is for models that continue text; this one fills in gaps")
    place = devices.pick(device)
    model = run.model(place, weights)
    accelerate.for_inference(model)
    with counted("filling in", None, quiet) as progress:
        score = masked_lm_score(
            model,
            run.tokenizers[0],
            documents,
            longest=settings.max_positions,
            share=settings.mask_prob,
            device=place,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(score)))
        return
    typer.echo(f"accuracy  {score.accuracy:7.2f} % of {score.masks:,} masks, {settings.mask_prob:.0%} of the tokens")
    typer.echo(f"loss      {score.loss:7.4f}   nats per mask")
