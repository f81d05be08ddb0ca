"""An image classifier as a black box, and what else claims to say which pixels mattered: attention and gradients.

N images, P patches of an image, S pixels of its side, C channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.interpret.explain.image_masks import image_box
from regard.interpret.explain.request import ExplainRequest, MaskingMode, shown_classes
from regard.interpret.explain.rise import Numbers
from regard.interpret.recorder import Recorder
from regard.interpret.rollout import rollout
from regard.models.vit import ImageBatch
from regard.nn.image_tokens import ImageTokens
from regard.runs import LoadedRun
from regard.tasks.image_classification import ImageClassificationTask

SCORE = "probability"


def image_request(loaded: LoadedRun, given: Any, target: str | None, masking: MaskingMode) -> ExplainRequest:
    """The black box of an image classifier for one image: a file, or an array; `target` names the class to explain."""
    task = loaded.prediction_task()
    assert isinstance(task, ImageClassificationTask)
    image = (task.read_argument(given) if isinstance(given, str) else task.input_list(given)[0][0]) / np.float32(255)

    def all_scores(images: list[Any]) -> Numbers:
        """Probabilities [B, classes]."""
        with torch.inference_mode():
            return _logits(loaded, torch.from_numpy(np.stack(images))).softmax(-1).double().cpu().numpy()

    explained, shown = shown_classes(task, loaded.run, all_scores([image])[0], target)
    classes = loaded.run.classes
    outputs, weights = tuple(classes[i] for i in shown), tuple(float(i == explained) for i in shown)

    def box(fill: str) -> Any:
        settings: dict[str, Any] = {"fill": fill, "cells": masking.cells, "outputs": outputs, "weights": weights}
        return image_box(lambda images: all_scores(images)[:, shown], image, score=SCORE, **settings)

    name = classes[explained]
    return ExplainRequest(
        box(masking.fill),
        name,
        f"probability of {name}",
        lambda: attention_rollout(loaded, image),
        masking=masking,
        others=lambda: {"gradient": gradient_saliency(loaded, image, explained)},
        insertion=box("blur"),
        image=image,
    )


def _logits(loaded: LoadedRun, images: Tensor) -> Tensor:
    labels = torch.zeros(len(images), dtype=torch.long)
    logits: Tensor = loaded.module.logits(ImageBatch(images, labels).to(loaded.device))
    return logits.float()


def gradient_saliency(loaded: LoadedRun, image: Any, class_id: int) -> Numbers:
    """The length over channels of the gradient of a class's probability by each pixel: [S S] (Simonyan et al. 2014)."""
    images = torch.from_numpy(image)[None].to(loaded.device).requires_grad_(True)
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(_logits(loaded, images).softmax(-1)[0, class_id], images)
    return grad[0].norm(dim=-1).flatten().double().cpu().numpy()


def attention_rollout(loaded: LoadedRun, image: Any) -> Numbers | None:
    """The share of each pixel's patch where the class is read, through all layers: [S S] (Abnar and Zuidema 2020).

    None: the model does not read images as patches.
    """
    tokens = next((module for module in loaded.module.modules() if isinstance(module, ImageTokens)), None)
    if tokens is None:
        return None
    config = tokens.config
    with torch.inference_mode(), Recorder(loaded.module) as recorder:
        _logits(loaded, torch.from_numpy(image)[None])
        rolled = rollout(list(recorder.attention.values()))  # [P, P]
        received = rolled.mean(0) if config.pooling == "mean" else rolled[0]
    side = config.image // config.patch
    patches = received[-side * side :].view(side, side).cpu().numpy()
    return patches.repeat(config.patch, 0).repeat(config.patch, 1).flatten().astype(np.float64)
