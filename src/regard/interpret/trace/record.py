"""Recording a trace: the model writes its output, or is given one, and one teacher-forced pass over it is recorded.

The best hypothesis of a beam search is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from regard import tasks
from regard.data.builtin import Pair
from regard.decoding.constraints import length_penalty
from regard.errors import UserError
from regard.interpret import interventions
from regard.interpret.interventions import Intervention
from regard.interpret.trace import alignment, entries
from regard.interpret.trace.adapter import TraceAdapter
from regard.interpret.trace.adapters import adapter_for
from regard.interpret.trace.entries import Arrays, Entry
from regard.interpret.trace.forward import ForwardPass, Forwards, TraceRequest, run_passes
from regard.interpret.trace.stats import describe, significant
from regard.interpret.trace.trace import FORMAT, VERSION, Header, Trace, digest, request_key
from regard.runs import LoadedRun


def record(
    loaded: LoadedRun,
    text: str,
    *,
    target: str | None = None,
    after: Sequence[int] | None = None,
    changes: Sequence[Mapping[str, Any] | Intervention] = (),
    run: str | None = None,
    step: int | None = None,
    reload: Callable[[], LoadedRun] | None = None,
) -> Trace:
    """Record a forward pass of a run over a text and its output, or a given one. See `Model.trace`.

    `run` and `step` are the name of the run (by default that of its folder) and the snapshot in the request. `reload`
    returns the run when `trace.layers` are computed, so that a trace need not keep it in memory.
    """
    if not text.strip() and loaded.task.has_source:
        raise UserError("there is nothing to trace: the text is blank")
    if target is not None and after is not None:
        raise UserError("give a target or the tokens so far, not both")
    request = TraceRequest(target, after, interventions.parse(changes))
    described: dict[str, Any] = {
        "run": run or loaded.run.path.name,
        "step": step,
        "text": text,
        "target": target,
        "continue": None if after is None else list(after),
        "changes": interventions.to_json(request.changes),
    }
    header: Header = {"format": FORMAT, "version": VERSION, "key": digest(request_key(*described.values()))}
    with torch.inference_mode():
        adapter = adapter_for(loaded)
        given, truncated = adapter.encode(text)
        passes = run_passes(loaded, adapter, given, request)
        header |= {"request": described, "model": _about(loaded, adapter, described["run"])}
        header["text"] = {
            "source": text,
            "target": passes.now.output.text,
            "cut": truncated,
            **_score(loaded, adapter, passes.now),
        }
        return _trace(loaded, adapter, header, passes, reload or (lambda: loaded))


def _trace(
    loaded: LoadedRun, adapter: TraceAdapter, header: Header, passes: Forwards, reload: Callable[[], LoadedRun]
) -> Trace:
    """Make the trace of recorded passes."""
    now, before, held, free = passes.now, passes.before, passes.held, passes.free
    arrays, streams = Arrays(), entries.streams(now)
    layers = entries.output_streams(adapter, streams)
    axes, attention = entries.axes(now, arrays), entries.attentions(now, arrays)
    masks: list[list[list[int]]] = []
    header |= {
        "axes": axes,
        "masks": masks,
        "attention": attention,
        "rollout": entries.rollouts(now, attention, arrays),
        "gates": list(entries.gates(now, arrays)),
        "stream": [stream.to_json(arrays) for stream in streams],
        "embedding": list(entries.embeddings(now, header["model"]["positions"], arrays)),
        "layers": [entries.describe_layer(stream) for stream in layers],
        "output": entries.output(adapter, now, arrays),
        "ctc": entries.ctc(now, arrays),
        "changes": header["request"]["changes"],
        "before": None if before is None else _before(loaded, adapter, before),
        "held": None if held is None else entries.probabilities(adapter, held),
        "forced": target_is_forced(header["request"]),
        "free": None if free is None else {"text": free.output.text, **_score(loaded, adapter, free)},
        "arrays": arrays.about,
    }
    lens = entries.LogitLens(adapter.outputs, adapter.encoder_only, layers, now.batch, *now.logits.shape)
    trace = Trace(header, arrays.made, lambda: lens(reload().module), partial(entries.vocabulary, adapter.outputs))
    pair = alignment.pair_of(loaded.recipe, header["text"]["source"]) if adapter.spec.has_alignment else None
    cross: dict[str, np.ndarray] = {}
    flags = {
        side: [torch.tensor([float(one[kind]) for one in axis["elements"]]) for kind in ("special", "punctuation")]
        for side, axis in axes.items()
    }
    for entry in header["attention"]:  # one at a time: float weights of many heads over a long text are large
        weights = entries.weights_of(now, entry)().float()
        entry["mask"] = entries.mask_number(now, entry, masks)
        entry["stats"] = describe(weights, *(flag.to(weights.device) for flag in flags[entry["keys"]]))
        exact = weights.cpu().numpy()
        trace.store(entry["array"], exact)
        if entry["part"] == "cross" and pair is not None:
            cross[entry["name"]] = exact
    header["text"]["reference"] = None if pair is None else pair.target
    header["gold"] = _gold(header, pair, cross)
    return trace


def _about(loaded: LoadedRun, adapter: TraceAdapter, run: str) -> Entry:
    settings = loaded.recipe.model
    return {
        "run": run,
        "name": loaded.run.path.name,
        "family": settings.family,
        "task": adapter.spec.kind,
        "input": adapter.spec.input_sides[0],
        "output": tasks.of(loaded.recipe).output,
        "step": loaded.step,
        "layers": layers_of(settings),
        "heads": heads_of(settings),
        "width": settings.width,
        "vocabulary": len(adapter.outputs),
        "parameters": sum(parameter.numel() for parameter in loaded.module.parameters()),
        "positions": getattr(settings, "positions", "none"),
    }


def layers_of(settings: Any) -> dict[str, int]:
    """The number of encoder layers and of decoder layers."""
    encoder, decoder = settings.encoder_decoder_layers
    return {"encoder": encoder, "decoder": decoder}


def heads_of(settings: Any) -> int:
    """The number of heads of each attention: 1 in a recurrent model without multi-head attention, 0 without any."""
    kind = getattr(settings, "attention", "multihead")
    return int(settings.heads) if kind == "multihead" else 0 if kind == "none" else 1


def target_is_forced(request: Mapping[str, Any]) -> bool:
    """Whether the output was given, or is the original one while attention rows are replaced."""
    return request["target"] is not None or any(change["kind"] == "row" for change in request["changes"])


def _score(loaded: LoadedRun, adapter: TraceAdapter, one: ForwardPass) -> Entry:
    """The score of the output, as the search computes it, and its log-probability."""
    each = zip(one.logp(adapter.outputs), one.sides.target.given, strict=True)
    written = [logp for logp, given in each if logp is not None and not given]
    total, score = sum(written), one.output.score
    if not adapter.has_score:
        return {"score": None, "logp": significant(total)}
    if score is None:
        score = total / length_penalty(loaded.recipe.decoding.length_penalty, len(written))
    return {"score": significant(score), "logp": significant(total)}


def _before(loaded: LoadedRun, adapter: TraceAdapter, before: ForwardPass) -> Entry:
    about = {"text": before.output.text, "tokens": before.sides.target.elements()}
    return about | _score(loaded, adapter, before) | entries.probabilities(adapter, before)


def _gold(header: Header, pair: Pair | None, cross: Mapping[str, np.ndarray]) -> Entry | None:
    """The gold links of the sentence, if the output is the reference translation."""
    if pair is None or " ".join(header["text"]["target"].split()) != pair.target:
        return None
    source, target = ([token["group"] for token in header["axes"][side]["elements"]] for side in ("source", "target"))
    return alignment.measured(pair, cross, source, target)
