"""Attention weights of the edges of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regard.attention.edges import EdgeMask
from regard.errors import UserError
from regard.interpret.recorder import Recorder
from regard.runs import LoadedRun
from regard.tasks.graph_view import GraphView, GraphViewTask


@dataclass(frozen=True)
class EdgeAttention:
    """A graph, the weight with which each receiver attends to each sender, and what the model predicts.

    `weights` [E] belong to the edges of `view.batch.graphs`; those to one receiver sum to 1. `before` is the prediction
    without anything hidden.
    """

    view: GraphView
    weights: npt.NDArray[np.float64]
    prediction: Any
    before: Any
    layers: str  # which layers and heads the weights are of, in words


def edge_attention(
    loaded: LoadedRun, given: str, layer: int | None = None, head: int | None = None, hidden: Sequence[str] = ()
) -> EdgeAttention:
    """The attention of a layer and a head (from 0; None: the mean of all) for an input of a run on graphs."""
    task = loaded.task
    if not isinstance(task, GraphViewTask):
        raise UserError(f"{loaded.run.path} was trained for {task.name}: only models of graphs have this view")
    loaded.require_single()
    whole = task.view(loaded.run, task.read_input(given))
    view = whole.without(hidden)
    before, _ = _predict(loaded, whole)
    prediction, layers = _predict(loaded, view)
    if layer is not None and layer >= len(layers):
        raise UserError(f"--layer {layer + 1}: this model has {len(layers)} layers")
    chosen = layers if layer is None else [layers[layer]]
    fewest = min(weights.shape[1] for weights in chosen)
    if head is not None and head >= fewest:
        which = "the last layer" if layer is None else f"layer {layer + 1}"
        raise UserError(f"--head {head + 1}: {which} has {fewest} head{'s' if fewest > 1 else ''}")
    mean = np.mean([weights.mean(1) if head is None else weights[:, head] for weights in chosen], 0)
    of_layer = f"mean of {len(layers)} layers" if layer is None else f"layer {layer + 1} of {len(layers)}"
    of_head = "mean of its heads" if head is None else f"head {head + 1}"
    return EdgeAttention(view, mean, prediction, before, f"{of_layer}, {of_head}")


def _predict(loaded: LoadedRun, view: GraphView) -> tuple[Any, list[npt.NDArray[np.float64]]]:
    """The prediction, and the weights [E, H] of each layer."""
    batch = view.batch.to(loaded.device)
    with torch.inference_mode(), Recorder(loaded.module) as seen:
        row = loaded.module.logits(batch)[0].float().cpu()
        layers = []
        for attended in seen.attention.values():
            offered = attended.offered
            mask = offered.allowed.sparse
            assert isinstance(mask, EdgeMask)
            q, k = (x.transpose(1, 2).flatten(0, 1) for x in (offered.query, offered.key))
            weights = mask.softmax(offered.score.on_edges(q, k, *reversed(mask.cells)))
            layers.append(weights.double().cpu().numpy())
    task = loaded.prediction_task()
    return task.prediction(loaded.run, row), layers
