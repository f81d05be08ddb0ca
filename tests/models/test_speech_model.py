"""The speech model: subsampling, SpecAugment and CTC on packed batches, each against its definition."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from regard.models import build
from regard.models.speech import SpeechModel, SpeechSettings
from regard.nn.sound import SoundEmbedding, ctc_loss, spec_augment, subsampled, warp_bands
from regard.packed import FeatureBatch, PackedFeatures, PackedLayout, PackedTokens
from regard.special_tokens import BOS, EOS, PAD

TINY = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "ffn_width": 16, "mels": 5, "dropout": 0}


def settings(**changes: Any) -> SpeechSettings:
    return SpeechSettings.model_validate({"family": "speech", **TINY, **changes})


def model(seed: int = 0, **changes: Any) -> SpeechModel:
    torch.manual_seed(seed)
    made = build(settings(**changes), 0, 9, False)
    assert isinstance(made, SpeechModel)
    return made.eval()


def frames(*lengths: int) -> list[Tensor]:
    torch.manual_seed(sum(lengths))
    return [torch.randn(n, 5) for n in lengths]


@pytest.mark.parametrize(("stem", "factor"), [("strided", 2), ("strided", 8), ("whisper", 2)])
def test_gradients_of_subsampling_are_those_of_each_recording_alone(stem: str, factor: int) -> None:
    torch.manual_seed(0)
    embedding = SoundEmbedding(settings(subsample=factor, stem=stem, positions="none"))
    packed = PackedFeatures.from_arrays(frames(16, 1, 8, 31))
    values = packed.values.requires_grad_()
    inputs = [values, *embedding.parameters()]
    found = torch.autograd.grad(embedding(values, packed.layout)[0].square().sum(), inputs)
    expected = torch.tensor(0.0)
    for part in packed.layout.split(values):
        x = part.T[None]
        for convolution in embedding.convolutions:
            x = nn.functional.gelu(convolution(x))
        tokens = x[0].T if embedding.project is None else embedding.project(x[0].T)
        expected = expected + tokens.square().sum()
    for one, other in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("stem", "factor"), [*(("strided", n) for n in (1, 2, 4, 8)), ("whisper", 2)])
def test_subsampling_of_a_packed_batch_is_that_of_each_recording_alone(stem: str, factor: int) -> None:
    torch.manual_seed(0)
    embedding = SoundEmbedding(settings(subsample=factor, stem=stem, positions="none"))
    recordings = frames(13, 1, 8, 30)
    packed = PackedFeatures.from_arrays(recordings, size=60)
    found, layout = embedding(packed.values, packed.layout)
    assert layout.lengths == tuple(subsampled(len(r), factor) for r in recordings)
    for one, recording in zip(layout.split(found), recordings, strict=True):
        x = recording.T[None]  # [1, F, n]
        for convolution in embedding.convolutions:
            assert isinstance(convolution, nn.Conv1d)
            x = nn.functional.gelu(convolution(x))
        expected = x[0].T if embedding.project is None else embedding.project(x[0].T)
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"features": "whisper"}, 'features = "whisper" needs sample_rate = 16000'),
        ({"stem": "whisper", "subsample": 4}, 'stem = "whisper" needs subsample = 2'),
        ({"prompt": "whisper", "ctc_weight": 0.3}, 'prompt = "whisper" needs ctc_weight = 0'),
        ({"source_positions": "rotary"}, "source_positions"),
    ],
)
def test_settings_of_whisper_that_do_not_fit_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        settings(**changes)


def test_spec_augment_zeroes_whole_bands_and_stretches_of_each_recording() -> None:
    layout = PackedLayout([40, 25], size=70)
    values = torch.ones(70, 12)
    torch.manual_seed(1)
    bands = [spec_augment(values, layout, (1, 6), (0, 0)) for _ in range(200)]
    widths = set()
    for masked in bands:
        for part in layout.split(masked):
            assert torch.equal(part, part[:1].expand_as(part))  # the same bands in all frames
            (zero,) = torch.where(part[0] == 0)
            widths.add(len(zero))
            assert not len(zero) or zero.tolist() == list(range(int(zero[0]), int(zero[-1]) + 1))
    assert widths == set(range(7))
    assert any((masked[0] != masked[40]).any() for masked in bands)  # recordings have masks of their own
    longest = 0
    for _ in range(100):
        parts = layout.split(spec_augment(values, layout, (0, 0), (2, 30), share=0.5))
        for part in parts:
            assert torch.equal(part, part[:, :1].expand_as(part))  # all bands of a frame
            hidden = int((part[:, 0] == 0).sum())
            assert hidden <= len(part) / 2 + 2
            longest = max(longest, hidden)
    assert longest > 10
    assert torch.equal(spec_augment(values, layout, (0, 0), (0, 0)), values)


def test_warped_bands_take_the_values_at_frequencies_that_are_raised_or_lowered_by_one_factor() -> None:
    rate, bands, layout = 8000, 40, PackedLayout([3, 2], size=6)
    mels = (np.arange(bands) + 1) * 2595 * np.log10(1 + rate / 1400) / (bands + 1)  # of the centres
    hertz = 700 * (10 ** (mels / 2595) - 1)
    values = torch.from_numpy(mels).float().expand(6, bands)  # linear in mels, so that interpolation is exact
    torch.manual_seed(3)
    factors = []
    for _ in range(100):
        warped = layout.split(warp_bands(values, layout, rate, 0.2))
        for part in warped:
            assert torch.equal(part, part[:1].expand_as(part))
            read = 700 * (10 ** (part[0].double().numpy() / 2595) - 1)  # the frequency whose value each band takes
            factor = read[20] / hertz[20]
            expected = np.clip(factor * hertz, hertz[0], hertz[-1])
            np.testing.assert_allclose(read, expected, rtol=1e-4)
            factors.append(factor)
        assert factors[-1] != factors[-2]  # recordings have factors of their own
    assert 0.8 <= min(factors) < 0.82 and 1.18 < max(factors) <= 1.2
    torch.testing.assert_close(warp_bands(values, layout, rate, 0.0), values)
    assert warp_bands(values[:, :1], layout, rate, 0.2).shape == (6, 1)


def test_bands_are_warped_in_training_alone() -> None:
    source = PackedFeatures.from_arrays(frames(30, 20))
    off, on = (model(ctc_weight=1, decoder_layers=0, band_masks=(0, 0), frame_masks=(0, 0), warp=w) for w in (0, 0.3))
    plain = off.encode(source)[0]
    assert torch.equal(on.encode(source)[0], plain) and torch.equal(off.train().encode(source)[0], plain)
    assert not torch.allclose(on.train().encode(source)[0], plain)


def all_paths(logits: Tensor, text: list[int]) -> float:
    """The probability of a text by the definition of CTC: the sum over paths that collapse to it."""
    probs, total = logits.softmax(-1), 0.0
    for path in product(range(logits.shape[1]), repeat=len(logits)):
        merged = [token for t, token in enumerate(path) if t == 0 or token != path[t - 1]]
        if [token for token in merged if token != PAD] == text:
            total += float(torch.stack([probs[t, token] for t, token in enumerate(path)]).prod())
    return total


def test_the_ctc_loss_sums_over_all_paths() -> None:
    torch.manual_seed(0)
    logits, layout = torch.randn(9, 4), PackedLayout([4, 3], size=9)
    texts = [[1, 1], [3]]
    labels = PackedTokens.from_lists([[*text, EOS] for text in texts], size=7)
    expected = -sum(
        torch.tensor(all_paths(part, text)).log().item() for part, text in zip(layout.split(logits), texts, strict=True)
    )
    assert ctc_loss(logits, layout, labels.ids, labels.layout).item() == pytest.approx(expected, rel=1e-5)


def test_the_ctc_loss_and_its_gradient_are_pytorch_s() -> None:
    torch.manual_seed(0)
    texts = [[1, 1, 2], [3], [5, 4, 5, 5], [6, 6, 6]]  # the last does not fit into its frames
    logits, layout = torch.randn(26, 7, requires_grad=True), PackedLayout([6, 4, 9, 4], size=26)
    labels = PackedTokens.from_lists([[*text, EOS] for text in texts], size=18)
    found = 3 * ctc_loss(logits, layout, labels.ids, labels.layout)
    (grad,) = torch.autograd.grad(found, logits)
    expected = torch.tensor(0.0)
    for part, text in zip(layout.split(logits.log_softmax(-1)), texts, strict=True):
        lengths = torch.tensor([len(part)]), torch.tensor([len(text)])
        expected = expected + 3 * nn.functional.ctc_loss(
            part[:, None], torch.tensor([text]), lengths[0], lengths[1], PAD, "sum", zero_infinity=True
        )
    (expected_grad,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-4)
    assert grad[:19].any(1).all() and not grad[19:].any()


def test_a_recording_that_is_too_short_for_its_text_counts_as_nothing() -> None:
    logits, layout = torch.randn(2, 4, requires_grad=True), PackedLayout([2])
    labels = PackedTokens.from_lists([[1, 2, 3, EOS]])
    loss = ctc_loss(logits, layout, labels.ids, labels.layout)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


def test_the_loss_weighs_ctc_and_the_decoder() -> None:
    made = model(ctc_weight=0.25)
    batch = FeatureBatch.from_lists(frames(30, 50), [[5, 6, EOS], [7, EOS]], bos=BOS)
    encoded, layout = made.encode(batch.source)
    ctc = ctc_loss(made.ctc_logits(encoded), layout, batch.labels, batch.inputs.layout)
    text = nn.functional.cross_entropy(made.logits(batch), batch.labels, reduction="sum")
    torch.testing.assert_close(made(batch), 0.25 * ctc + 0.75 * text)
    assert model(ctc_weight=0).ctc is None  # nothing that is never trained


def test_ctc_alone_has_no_decoder_and_trains_all_its_weights() -> None:
    made = model(ctc_weight=1, decoder_layers=0)
    assert len(made.decoder) == 0 and not made.has_decoder
    batch = FeatureBatch.from_lists(frames(30, 50), [[5, 6, EOS], [7, EOS]], bos=BOS)
    made(batch).backward()
    assert all(p.grad is not None for p in made.parameters())
    assert SpeechSettings.model_validate({"family": "speech", "ctc_weight": 1}).decoder_layers == 0
    with pytest.raises(ValidationError, match="CTC alone has no decoder"):
        settings(ctc_weight=1)
    with pytest.raises(ValidationError, match="CTC alone has no decoder"):
        settings(decoder_layers=0)


def test_masks_are_drawn_in_training_only() -> None:
    made = model()
    batch = FeatureBatch.from_lists(frames(60), [[5, EOS]], bos=BOS)
    assert torch.equal(made(batch), made(batch))
    made.train()
    torch.manual_seed(0)
    first = made(batch)
    assert not torch.equal(first, made(batch))
    torch.manual_seed(0)
    assert torch.equal(first, made(batch))
