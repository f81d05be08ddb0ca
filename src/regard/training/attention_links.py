"""Links for guided alignment from a model's own attention (training.guided_alignment = "own").

As in Garg et al. (2019), training has two stages: a model is trained, its attention aligns the training pairs, and
training goes on from it with those links. Here the attention is made symmetric with itself, read from the side of the
target and of the source; links of two models of both directions come from `regard align --reverse`.
"""

from __future__ import annotations

from itertools import islice

import torch

from regard import accelerate
from regard.data.corpora import corpora, read_pairs
from regard.errors import UserError
from regard.files import atomic_write
from regard.metrics.symmetrise import pharaoh
from regard.run_dir import RunDir
from regard.tasks.aligner import Aligner, TwoWayAligner
from regard.tasks.text import LINKS_FILE
from regard.training.progress import Reporter

METHOD = "grow-diagonal-and"
CHUNK_PAIRS = 10_000


def write_attention_links(run: RunDir, origin: RunDir | None, device: torch.device, reporter: Reporter) -> None:
    """Write the links of all training pairs, if the recipe needs them and they do not exist."""
    recipe, path = run.recipe, run.path / LINKS_FILE
    if recipe.training.guided_alignment != "own" or path.exists():
        return
    if origin is None:
        raise UserError('training.guided_alignment = "own" takes links from the attention of another run: give --from')
    model = origin.model(device)
    accelerate.for_inference(model)
    aligner: TwoWayAligner | None = None
    pairs = (pair for corpus in corpora(recipe.data) for pair in read_pairs(corpus, recipe.data))
    done = 0
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        while chunk := list(islice(pairs, CHUNK_PAIRS)):
            aligner = aligner or TwoWayAligner.choose(Aligner(model, origin.tokenizers, origin.recipe), None, chunk)
            file.writelines(pharaoh(links) + "\n" for links in aligner(chunk, METHOD))
            done += len(chunk)
            reporter.counted(f"links by the attention of {origin.path}", done)
