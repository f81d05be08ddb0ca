"""Recording a trace: the model writes its output, or is given one, and that is run once more, teacher-forced and heard.

So a beam search, whatever it went through, is recorded by its winning hypothesis alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from regard.data.builtin import Pair
from regard.errors import UserError
from regard.interpret import interventions as changing
from regard.interpret.interventions import Intervention
from regard.interpret.trace import alignment, entries
from regard.interpret.trace.entries import Arrays, Entry
from regard.interpret.trace.forward import ForwardPass, Forwards, TraceRequest, run_passes
from regard.interpret.trace.stats import describe, significant
from regard.interpret.trace.tasks import TraceTask, task_of
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
    again: Callable[[], LoadedRun] | None = None,
) -> Trace:
    """What happens in a model as it reads a text and writes its output, or one that is given. See `Model.trace`.

    `run` and `step` are what the request called the model and its snapshot, where that is not its folder's name;
    `again` gives the model once more when `trace.layers` are asked for, where the trace shall not keep it alive.
    """
    if not text.strip() and not loaded.recipe.data.is_text:
        raise UserError("there is nothing to look at: the text is blank")
    if target is not None and after is not None:
        raise UserError("an output is given as a target, or as the tokens so far: not both")
    asked = TraceRequest(target, after, changing.parse(changes))
    request: dict[str, Any] = {
        "run": run or loaded.run.path.name,
        "step": step,
        "text": text,
        "target": target,
        "continue": None if after is None else list(after),
        "changes": changing.to_json(asked.changes),
    }
    header: Header = {"format": FORMAT, "version": VERSION, "key": digest(request_key(*request.values()))}
    with torch.inference_mode():
        task = task_of(loaded)
        tokens, cut = task.read(text)
        passes = run_passes(loaded, task, tokens, asked)
        header |= {"request": request, "model": _about(loaded, task, request["run"])}
        header["text"] = {
            "source": text,
            "target": passes.now.said.text,
            "cut": cut,
            **_scored(loaded, task, passes.now),
        }
        return _trace(loaded, task, header, passes, again or (lambda: loaded))


def _trace(
    loaded: LoadedRun, task: TraceTask, header: Header, passes: Forwards, again: Callable[[], LoadedRun]
) -> Trace:
    """Everything that the passes hold."""
    now, before, held, free = passes.now, passes.before, passes.held, passes.free
    arrays, streams = Arrays(), entries.streams(now)
    speaking = entries.speaking(task, streams)
    tokens = {side: getattr(now.sides, side).to_json() for side in ("source", "target", "inputs")}
    masks: list[list[list[int]]] = []
    header |= {
        "tokens": tokens,
        "masks": masks,
        "attention": entries.attentions(now, arrays),
        "gates": list(entries.gates(now, arrays)),
        "stream": [stream.to_json(arrays) for stream in streams],
        "embedding": list(entries.embeddings(now, header["model"]["positions"], arrays)),
        "layers": [entries.named(stream) for stream in speaking],
        "output": entries.output(task, now, arrays),
        "changes": header["request"]["changes"],
        "before": None if before is None else _before(loaded, task, before),
        "held": None if held is None else entries.probabilities(task, held),
        "forced": target_is_forced(header["request"]),
        "free": None if free is None else {"text": free.said.text, **_scored(loaded, task, free)},
        "arrays": arrays.about,
    }
    lens = entries.Lens(task.target, entries.is_whole(task), speaking, now.batch, *now.logits.shape)
    trace = Trace(header, arrays.made, lambda: lens(again().module), partial(entries.vocabulary, task.target))
    pair = alignment.pair_of(loaded.recipe, header["text"]["source"]) if task.kind == "translate" else None
    cross: dict[str, np.ndarray] = {}
    flags = {
        side: [torch.tensor([float(token[kind]) for token in tokens[side]]) for kind in ("mark", "punctuation")]
        for side in tokens
    }
    for entry in header["attention"]:  # one at a time: of many heads over a long text only small integers are kept
        weights = now.seen.attention[entry["name"]].sentence(0).float()
        entry["mask"] = entries.mask_number(now.seen.attention[entry["name"]], masks)
        entry["stats"] = describe(weights, *(flag.to(weights.device) for flag in flags[entry["keys"]]))
        exact = weights.cpu().numpy()
        trace.keep(entry["array"], exact)
        if entry["part"] == "cross" and pair is not None:
            cross[entry["name"]] = exact
    header["text"]["reference"] = None if pair is None else pair.target
    header["gold"] = _gold(header, pair, cross)
    return trace


def _about(loaded: LoadedRun, task: TraceTask, run: str) -> Entry:
    settings = loaded.recipe.model
    return {
        "run": run,
        "name": loaded.run.path.name,
        "family": settings.family,
        "task": task.kind,
        "step": loaded.step,
        "layers": layers_of(settings),
        "heads": heads_of(settings),
        "width": settings.width,
        "vocabulary": len(task.target),
        "parameters": sum(parameter.numel() for parameter in loaded.module.parameters()),
        "positions": getattr(settings, "positions", "none"),
    }


def layers_of(settings: Any) -> dict[str, int]:
    """Layers that read and layers that write; a stack alone is one of the two."""
    both = {side: getattr(settings, f"{side}_layers", 0) for side in ("encoder", "decoder")}
    alone = "encoder" if settings.family == "bert" else "decoder"
    return both | ({alone: settings.layers} if hasattr(settings, "layers") else {})


def heads_of(settings: Any) -> int:
    """Heads of each attention; a recurrent model has one unless it says "multihead"."""
    kind = getattr(settings, "attention", "multihead")
    return int(settings.heads) if kind == "multihead" else 0 if kind == "none" else 1


def target_is_forced(request: Mapping[str, Any]) -> bool:
    """Whether the output was given, or is the original one while rows of attention are replaced."""
    return request["target"] is not None or any(change["kind"] == "row" for change in request["changes"])


def _scored(loaded: LoadedRun, task: TraceTask, one: ForwardPass) -> Entry:
    """The score of what was written, as the search reports it, and its plain log-probability."""
    each = zip(one.logp(task.target), one.sides.target.given, strict=True)
    written = [logp for logp, given in each if logp is not None and not given]
    total, score = sum(written), one.said.score
    if score is None:
        score = total / ((5 + len(written)) / 6) ** loaded.recipe.decoding.length_penalty
    return {"score": significant(score), "logp": significant(total)}


def _before(loaded: LoadedRun, task: TraceTask, before: ForwardPass) -> Entry:
    about = {"text": before.said.text, "tokens": before.sides.target.to_json()}
    return about | _scored(loaded, task, before) | entries.probabilities(task, before)


def _gold(header: Header, pair: Pair | None, cross: Mapping[str, np.ndarray]) -> Entry | None:
    """The links of the sentence, if the output is the corpus's own translation."""
    if pair is None or " ".join(header["text"]["target"].split()) != pair.target:
        return None
    source, target = ([token["word"] for token in header["tokens"][side]] for side in ("source", "target"))
    return alignment.measured(pair, cross, source, target)
