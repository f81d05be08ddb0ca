"""`regard evaluate` for runs that were trained on plain text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from regard import accelerate, devices, tasks
from regard.cli.groups import LoadOptions
from regard.cli.progress import progress_bar
from regard.data.corpora import held_out
from regard.errors import UserError
from regard.metrics.masked_lm import masked_lm_score
from regard.metrics.perplexity import text_perplexity
from regard.recipes.schema import DataSettings
from regard.run_dir import RunDir
from regard.tasks.masked_lm import masking_policy


def evaluate_text(
    run: RunDir,
    data: DataSettings,
    split: str,
    text: Path | None,
    stride: int | None,
    loading: LoadOptions,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the perplexity of a split or a file; for a masked language model, its accuracy."""
    documents = _documents(data, split, text)
    if tasks.of(run.recipe).output == "fills":
        _masked_lm(run, documents, stride, loading, as_json, quiet)
    else:
        _perplexity(run, documents, stride, loading, as_json, quiet)


def _documents(data: DataSettings, split: str, text: Path | None) -> list[str]:
    if text is not None:
        data, split = data.model_copy(update={"test": [str(text)], "folder": None}), "test"
    return [document for _, document in held_out(data, split)]


def _perplexity(
    run: RunDir, documents: list[str], stride: int | None, loading: LoadOptions, as_json: bool, quiet: bool
) -> None:
    context, target = run.recipe.model.max_positions, devices.pick(loading.device)
    step = max(context // 2, 1) if stride is None else stride
    model = run.model(target, loading.weights)
    accelerate.for_inference(model)
    with progress_bar("scoring", None, quiet) as progress:
        score = text_perplexity(
            model,
            run.tokenizers[1],
            documents,
            context=context,
            stride=step,
            stream=run.recipe.data.documents == "stream",
            device=target,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps({**asdict(score), "context": context, "stride": step}))
        return
    typer.echo(f"perplexity     {score.perplexity:8.3f}   per token of this run's vocabulary")
    typer.echo(f"loss           {score.loss:8.4f}   nats per token")
    if score.bits_per_byte is None:
        typer.echo(f"bits per byte         -   {score.unknown:,} words are not in the vocabulary")
    else:
        typer.echo(
            f"bits per byte  {score.bits_per_byte:8.4f}   of {score.bytes:,} bytes, independent of the vocabulary"
        )
    typer.echo(f"{score.tokens:,} tokens, each scored once, in windows of {context} tokens with a stride of {step}")


def _masked_lm(
    run: RunDir, documents: list[str], stride: int | None, loading: LoadOptions, as_json: bool, quiet: bool
) -> None:
    if stride is not None:
        raise UserError("--stride has no effect for a masked language model")
    share = masking_policy(run.recipe, run.tokenizers[0]).share
    target = devices.pick(loading.device)
    model = run.model(target, loading.weights)
    accelerate.for_inference(model)
    with progress_bar("scoring", None, quiet) as progress:
        score = masked_lm_score(
            model,
            run.tokenizers[0],
            documents,
            longest=run.recipe.model.max_positions,
            share=share,
            device=target,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(asdict(score)))
        return
    typer.echo(f"accuracy  {score.accuracy:7.2f} % of {score.masks:,} masked tokens, {share:.0%} of all")
    typer.echo(f"loss      {score.loss:7.4f}   nats per masked token")
