"""Guided alignment: the loss by its formula, links from a file to batches, static batches, resuming, and learning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import CPU, small, tensors, train_run

from regard.accelerate import checkpoint_activations
from regard.data.links import LinkedPacker
from regard.data.token_cache import build
from regard.data.token_store import Ragged, TokenStore, join_link
from regard.errors import UserError
from regard.interpret.recorder import Recorder
from regard.models.transformer import Transformer
from regard.models.transformer_settings import TransformerSettings
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.tasks.aligner import Aligner, AttentionView, linked
from regard.text.tokenizers import WordTokenizer
from regard.training.static_batch import StaticBatchShape

COPIED = {"corpus": "copy", "count": 200}
EOS = 2
SOURCES = [[5, 6, 7, EOS], [8, EOS], [5, 5, 9, 6, EOS]]
TARGETS = [[6, 5, EOS], [8, 8, 8, EOS], [9, EOS]]
# (source token, target token) of each pair; target token 1 of the first pair has two links, that of the last one none.
LINKS = [[(0, 0), (1, 1), (2, 1)], [(0, 0), (0, 2)], [(2, 0)]]


def store() -> TokenStore:
    links = Ragged.of([[join_link(*link) for link in pair] for pair in LINKS])
    return replace(TokenStore.of(SOURCES, TARGETS), links=links)


def batch(static: bool = False, weight: float = 0.5) -> SeqBatch:
    return LinkedPacker([store()], [1.0], target_budget=16, seed=1, static=static, link_weight=weight).batch_at(0)


def model(**settings: object) -> Transformer:
    torch.manual_seed(1)
    sizes = {"width": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 3, "ffn_width": 16, "dropout": 0.0}
    made = Transformer(TransformerSettings.model_validate({**sizes, **settings}), 12, 12)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made


def expected_loss(made: Transformer, given: SeqBatch) -> torch.Tensor:
    """- sum of weight · log attention, by the weights that the recorder sees in the guided head, pair by pair."""
    with Recorder(made) as seen:
        made.logits(given)
        attention = seen.attention["decoder.1.cross_attn"]  # the last layer but one
        order = [given.source.layout.split(given.source.ids)[n].tolist() for n in range(len(SOURCES))]
        total = torch.zeros(())
        for n, tokens in enumerate(order):
            links = LINKS[SOURCES.index(tokens)]
            for source, target in links:
                share = 1 / sum(other == target for _, other in links)
                total = total - 0.5 * share * attention.sentence(n)[0, target + 1, source].log()
    return total


def test_the_loss_is_the_cross_entropy_of_the_normalised_links_and_the_reading_rows() -> None:
    made, given = model(), batch()
    guided, plain = made(given), made(replace(given, links=None))
    torch.testing.assert_close(guided - plain, expected_loss(made, given))
    assert made.decoder[1].cross_attn.guided_qk is None


@pytest.mark.parametrize("settings", [{"norm_first": False}, {"qk_norm": True}, {"cross_score": "dot"}])
def test_the_loss_of_other_blocks(settings: dict[str, object]) -> None:
    made, given = model(**settings), batch()
    torch.testing.assert_close(made(given) - made(replace(given, links=None)), expected_loss(made, given))


def test_its_gradient_reaches_the_guided_head_and_what_is_below_alone() -> None:
    made, given = model(), batch()
    (made(given) - made(replace(given, links=None))).backward()
    grads = {name: 0.0 if p.grad is None else p.grad.abs().max().item() for name, p in made.named_parameters()}
    assert grads["decoder.1.cross_attn.q_proj.weight"] > 1e-4 and grads["encoder.0.feed_forward.w_in.weight"] > 1e-4
    assert grads["decoder.2.self_attn.qkv_proj.weight"] < 1e-6 and grads["decoder.1.feed_forward.w_in.weight"] < 1e-6
    assert made.decoder[1].cross_attn.q_proj.weight.grad[4:].abs().max() < 1e-6  # the other head


def test_a_static_batch_has_the_same_loss_and_gradient() -> None:
    made, static = model(), batch(static=True)
    shape = StaticBatchShape(static)
    shared = shape.unflatten(shape.flatten(static))
    losses, grads = [], []
    for given in (batch(), shared):
        made.zero_grad()
        losses.append(made(given))
        losses[-1].backward()
        grads.append([parameter.grad.clone() for parameter in made.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


def test_activation_checkpointing_and_r_drop_leave_the_loss_as_it_is() -> None:
    plain, recomputed = model().train(), model().train()
    checkpoint_activations(recomputed)
    losses = [made(batch()) for made in (plain, recomputed)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    pairs = zip(plain.parameters(), recomputed.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=1e-5) for a, b in pairs)
    without = replace(batch(), links=None)  # without dropout both passes of R-Drop are the same
    torch.testing.assert_close(plain(batch(), 0.0, 1.0) - plain(without, 0.0, 1.0), losses[0] - plain(without))


def test_batches_share_the_weight_of_a_token_among_its_links() -> None:
    links = batch(static=True, weight=0.5).links
    assert links is not None and len(links.weight) > 6 and links.weight.sum() == pytest.approx(0.5 * 5)
    cells = {}
    real = links.weight > 0
    for n, row, column, weight in zip(*(t[real].tolist() for t in vars(links).values()), strict=True):
        cells[n, row, column] = weight
    assert sorted(cells.values()) == [0.25, 0.25, 0.5, 0.5, 0.5, 0.5] and len(cells) == 6


# -- from files --------------------------------------------------------------------------------------------------------


def files(folder: Path, links: str, pairs: str = "a b\tc d\n\tx\nb  a\td c\nb a\td c\n") -> Recipe:
    (folder / "pairs.tsv").write_text(pairs)
    (folder / "links.txt").write_text(links)
    data = {"pairs": str(folder / "pairs.tsv")}
    return small(folder, data=data, guided_alignment=str(folder / "links.txt"))


def stores(recipe: Recipe) -> list[TokenStore]:
    tokenizer = WordTokenizer([], ["a", "b", "c", "d"])
    return build(recipe, tokenizer, tokenizer, links=Path(recipe.training.guided_alignment or ""))


def test_links_of_a_file_belong_to_the_pairs_that_are_kept(tmp_path: Path) -> None:
    (made,) = stores(files(tmp_path, "0-1 1-0 1-0 7-0\n0-0\n0-0\n1-1\n"))
    assert made.links is not None and len(made.links) == len(made) == 3  # the blank pair is dropped with its links
    words = [[(0, 1), (1, 0)], [(0, 0)], [(1, 1)]]
    assert [list(made.links[n]) for n in range(3)] == [[join_link(*link) for link in pair] for pair in words]
    again = stores(files(tmp_path, "0-0\n0-0\n0-0\n1-1\n"))[0]
    assert made.digest != again.digest


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("0-0\n0-0\n0-0\n", "fewer lines than there are training pairs"),
        ("0-0\n0-0\n0-0\n0-0\n0-0\n", "has 5 lines, but there are 4 training pairs"),
        ("0-0\n0:0\n0-0\n0-0\n", "line 2: expected links such as 0-0 1-2"),
    ],
)
def test_a_file_of_other_links_is_refused(tmp_path: Path, links: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stores(files(tmp_path, links))


def test_a_missing_file_and_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file: .*none\.txt"):
        train_run(small(tmp_path, guided_alignment=str(tmp_path / "none.txt")), tmp_path / "run")
    with pytest.raises(ValueError, match=r"needs model\.family"):
        Recipe.model_validate({"data": COPIED, "model": {"family": "gpt"}, "training": {"guided_alignment": "x"}})
    with pytest.raises(ValueError, match="score dot or scaled-dot"):
        small(tmp_path, guided_alignment="x", model={"score": "additive"})
    with pytest.raises(UserError, match="give --from"):
        train_run(small(tmp_path, guided_alignment="own"), tmp_path / "own")


def test_a_run_guided_by_its_own_links_resumes_as_if_uninterrupted(tmp_path: Path) -> None:
    train_run(small(tmp_path, data=COPIED), tmp_path / "first")
    guided = small(tmp_path, data=COPIED, guided_alignment="own", accumulate=2)
    whole = train_run(guided, tmp_path / "whole", start_from=tmp_path / "first")
    assert len((tmp_path / "whole" / "links.txt").read_text().splitlines()) == 200
    half = small(tmp_path, data=COPIED, guided_alignment="own", accumulate=2, steps=6)
    train_run(half, tmp_path / "parts", start_from=tmp_path / "first")
    parts = train_run(guided, tmp_path / "parts")
    ours, theirs = (tensors(run.resume) for run in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_guided_head_learns_the_links_of_a_file(tmp_path: Path) -> None:
    """Links of the wrong words: source word k with target word k - 1, which nothing but the file suggests."""
    pairs = [f"{a} {b} {c}" for a in "abcdefgh" for b in "abcdefgh" for c in "abcd"]
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text}\n" for text in pairs))
    (tmp_path / "links.txt").write_text("1-0 2-1 0-2\n" * len(pairs))
    recipe = small(
        tmp_path,
        data={"pairs": str(tmp_path / "pairs.tsv")},
        model={"width": 32, "ffn_width": 64, "dropout": 0.0},
        guided_alignment=str(tmp_path / "links.txt"),
        guided_weight=1.0,
        steps=120,
        warmup=20,
        batch_tokens=256,
        learning_rate=0.01,
        validate_every=120,
        save_every=120,
    )
    run = train_run(recipe, tmp_path / "run")
    aligner = Aligner(run.model(CPU, "last"), run.tokenizers, run.recipe)
    tables = aligner([(text, text) for text in pairs[:20]], AttentionView(0, 0, "reading"))
    right = [linked(table)[j, i] for table in tables for i, j in ((1, 0), (2, 1), (0, 2))]
    assert sum(right) > 0.95 * len(right)
