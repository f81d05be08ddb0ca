"""Speech recognition: an encoder of log-mel frames, trained with CTC, with an attention decoder, or with both.

Shapes: S frames of a packed batch, F bands of a frame, S' frames after subsampling, T target tokens, D width, V
vocabulary, N recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from regard import taps, tensor_io
from regard.models.transformer import EncoderDecoder
from regard.models.transformer_settings import TransformerSettings
from regard.nn import flops
from regard.nn.block_config import BlockConfig
from regard.nn.blocks import BlockStack
from regard.nn.sound import KERNEL, SoundEmbedding, ctc_loss, spec_augment, subsampled, warp_bands
from regard.packed import FeatureBatch, PackedFeatures, PackedLayout
from regard.registry import MODELS, POSITIONS, NameIn

FRAME = 0.01  # seconds between two frames of features
WHISPER_RATE = 16000  # samples per second of Whisper's features


class SpeechSettings(TransformerSettings):
    """An encoder of log-mel frames with CTC, an attention decoder, or both (Watanabe et al. 2017)."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": dict(width=64, heads=4, encoder_layers=3, decoder_layers=1, ffn_width=256, dropout=0.1),
        "small": dict(width=144, heads=4, encoder_layers=6, decoder_layers=2, ffn_width=576, dropout=0.1),
        "base": dict(width=256, heads=4, encoder_layers=8, decoder_layers=3, ffn_width=1024, dropout=0.1),
    }
    DEFAULT_SIZE: ClassVar[str] = "tiny"
    TASKS: ClassVar[tuple[str, ...]] = ("speech",)

    family: Literal["speech"] = Field("speech", description="model family")  # type: ignore[assignment]
    size: Literal["tiny", "small", "base"] = Field(
        "tiny", description="preset for the sizes below; each can be set separately"
    )
    decoder_layers: int = Field(..., ge=0, description="number of decoder layers; without a decoder (CTC alone): 0")
    features: Literal["standard", "whisper"] = Field(
        "standard",
        description="log-mel features: of mean 0 and variance 1 over a recording; or as Whisper computes them",
    )
    window: float = Field(
        30.0,
        ge=1,
        le=600,
        description='features = "whisper": seconds that are read at once: shorter ones end in silence, longer ones '
        "are cut",
    )
    stem: Literal["strided", "whisper"] = Field(
        "strided",
        description="strided: convolutions that each halve the frames, and a linear layer; whisper: a convolution of "
        "all frames, and one that halves them",
    )
    source_positions: Annotated[str, NameIn(POSITIONS, where=lambda kind: kind.adds_vectors)] | None = Field(
        None, description="position encoding of the frames; not set: same as positions"
    )
    prompt: Literal["none", "whisper", "whisper-en"] = Field(
        "none",
        description="tokens that every text begins with: none, or Whisper's, of data.language, data.speech_task and no "
        "timestamps; whisper-en: of no timestamps alone",
    )
    sample_rate: int = Field(8000, ge=1000, le=192000, description="samples per second; other sounds are resampled")
    mels: int = Field(40, ge=1, le=256, description="bands of frequency that a frame has")
    subsample: Literal[1, 2, 4, 8] = Field(
        4, description="frames (of 10 ms) that become one; with CTC a text must not have more tokens than frames"
    )
    ctc_weight: float = Field(
        0.3, ge=0, le=1, description="weight of CTC in the loss and in the search; 0: decoder alone, 1: CTC alone"
    )
    band_masks: tuple[int, int] = Field(
        (2, 8), description="SpecAugment in training: number of masks of bands, and bands of a mask at most"
    )
    frame_masks: tuple[int, int] = Field(
        (2, 20), description="SpecAugment in training: number of masks in time, and frames of a mask at most"
    )

    warp: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="vocal tract length perturbation in training: the largest share by which the frequencies of a "
        "recording are raised or lowered; 0: none",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_decoder(cls, given: Any) -> Any:
        """Remove the decoder of the preset if there is CTC alone."""
        if isinstance(given, dict) and given.get("ctc_weight") == 1:
            return {"decoder_layers": 0, **given}
        return given

    @model_validator(mode="after")
    def _check_decoder(self) -> SpeechSettings:
        if (self.ctc_weight == 1) != (self.decoder_layers == 0):
            raise ValueError("decoder_layers = 0 and ctc_weight = 1 go together: CTC alone has no decoder")
        if min(*self.band_masks, *self.frame_masks) < 0:
            raise ValueError("band_masks and frame_masks must not be negative")
        return self

    @model_validator(mode="after")
    def _check_whisper(self) -> SpeechSettings:
        if self.features == "whisper" and self.sample_rate != WHISPER_RATE:
            raise ValueError(f'features = "whisper" needs sample_rate = {WHISPER_RATE}')
        if self.features == "whisper" and self.warp:
            raise ValueError('warp needs features = "standard", whose scale of frequencies it reads')
        if self.stem == "whisper" and self.subsample != 2:
            raise ValueError('stem = "whisper" needs subsample = 2')
        if self.prompt != "none" and self.ctc_weight:
            raise ValueError(f'prompt = "{self.prompt}" needs ctc_weight = 0: CTC reads no prompt')
        return self

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the convolutions before the encoder."""
        return (1, 2) if self.stem == "whisper" else (2,) * (self.subsample.bit_length() - 1)

    @property
    def max_frames(self) -> int:
        """The most frames that the encoder reads, after subsampling."""
        return round(self.window / FRAME) // self.subsample if self.features == "whisper" else self.max_positions

    def forward_flops(self, batch: Any, target_size: int) -> int:
        block, frames, lengths = BlockConfig.from_settings(self), batch.source.layout, batch.inputs.layout.lengths
        source = [subsampled(n, self.subsample) for n in frames.lengths]
        total, width, rest = 0, self.mels, sum(frames.lengths)
        for stride in self.strides:
            rest //= stride
            total, width = total + 2 * rest * KERNEL * width * self.width, self.width
        projected = sum(source) if self.stem == "strided" else 0
        total += 2 * projected * width * self.width + self.encoder_layers * flops.encoder_block(block, source)
        total += self.decoder_layers * flops.decoder_block(block, lengths, source)
        heads = sum(source) * (self.ctc_weight > 0) + sum(lengths) * (self.ctc_weight < 1)
        return total + 2 * heads * self.width * target_size

    def summary(self) -> str:
        return "speech (CTC)" if self.ctc_weight == 1 else "speech"


@MODELS.register("speech")
class SpeechModel(EncoderDecoder):
    """p(text) by CTC over the encoder's frames, by the decoder's tokens one after the other, or by both.

    With CTC alone, the output projection reads frames, and there is no decoder.
    """

    Settings = SpeechSettings
    settings: SpeechSettings
    source_embedding: SoundEmbedding

    def __init__(self, settings: SpeechSettings, source_size: int, target_size: int, shared: bool = False) -> None:
        super().__init__(settings, SoundEmbedding(settings), target_size)
        if not self.has_decoder:
            self.decoder = BlockStack([])  # without the norm after its last block
        self.ctc = nn.Linear(settings.width, target_size) if 0 < settings.ctc_weight < 1 else None
        self.static_shapes = False  # the CTC loss needs the lengths on the host

    @property
    def has_decoder(self) -> bool:
        return self.settings.ctc_weight < 1

    @property
    def has_ctc(self) -> bool:
        return self.settings.ctc_weight > 0

    def init_from(self, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Load another run's weights; a `body` leaves the decoder and CTC's projection new."""
        own = tensor_io.model_tensors(self)
        if len(self.body(tensors)) == len(tensors):
            tensors = {**tensors, **{name: own[name] for name in own.keys() - self.body(own).keys()}}
        super().init_from(tensors, origin)

    @staticmethod
    def body(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the encoder, which do not depend on the vocabulary."""
        return {name: t for name, t in tensors.items() if name.startswith(("source_embedding.", "encoder."))}

    def embed_source(self, source: PackedFeatures) -> tuple[Tensor, PackedLayout]:
        values, layout = source.values, source.layout
        if self.training and self.settings.warp:
            values = warp_bands(values, layout, self.settings.sample_rate, self.settings.warp)
        if self.training:
            values = spec_augment(values, layout, self.settings.band_masks, self.settings.frame_masks)
        embedded: tuple[Tensor, PackedLayout] = self.source_embedding(values, layout)
        return embedded

    def encoded_length(self, length: int) -> int:
        return subsampled(length, self.settings.subsample)

    def forward(self, batch: FeatureBatch, smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
        """The training loss: w · CTC + (1 - w) · cross-entropy of the decoder, summed, with w = `ctc_weight`."""
        weight = self.settings.ctc_weight
        if not weight:
            return super().forward(batch, smoothing, r_drop)
        encoded, layout = self.encode(batch.source)
        loss = ctc_loss(self.ctc_logits(encoded), layout, batch.labels, batch.inputs.layout)
        if not self.has_decoder:
            return loss
        text = self.token_loss(lambda: self.decode(batch.inputs, encoded, layout), batch, smoothing)
        return weight * loss + (1 - weight) * text

    def ctc_logits(self, encoded: Tensor) -> Tensor:
        """Encoded frames [S', D] -> logits [S', V] of tokens and of the blank, which is `PAD`."""
        return taps.tap(self, "ctc", self.linear(encoded, *self.lm_head()) if self.ctc is None else self.ctc(encoded))

    def ctc_log_probs(self, encoded: Tensor, layout: PackedLayout) -> list[Tensor]:
        """[frames, V] for each recording, of encoded frames [S', D]."""
        return layout.split(self.ctc_logits(encoded).float().log_softmax(-1))

    def logits(self, batch: FeatureBatch) -> Tensor:
        """[T, V] for every target token; with CTC alone, [S', V] for every frame."""
        encoded, layout = self.encode(batch.source)
        if not self.has_decoder:
            return self.ctc_logits(encoded)
        if self.has_ctc and taps.has_listeners():
            self.ctc_logits(encoded)  # for a recorder
        return self.project(self.decode(batch.inputs, encoded, layout))
