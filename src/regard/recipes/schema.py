"""A recipe: data, text, model, training and decoding settings, checked strictly.

Every field's description is the comment that `regard recipes NAME` prints beside it, so this file is also the manual.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PRESETS: dict[str, dict[str, Any]] = {
    # width, heads, layers, inner; base and big are those of "Attention Is All You Need", table 3
    "tiny": dict(width=128, heads=4, encoder_layers=2, decoder_layers=2, inner=512, dropout=0.1),
    "small": dict(width=256, heads=4, encoder_layers=3, decoder_layers=3, inner=1024, dropout=0.1),
    "base": dict(width=512, heads=8, encoder_layers=6, decoder_layers=6, inner=2048, dropout=0.1),
    "big": dict(width=1024, heads=16, encoder_layers=6, decoder_layers=6, inner=4096, dropout=0.3),
}


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Corpus(Settings):
    """One body of sentence pairs: a built-in one, two line-aligned files, or one file of pairs."""

    corpus: str | None = Field(None, description="a built-in corpus: en-es, copy, reverse, sort")
    source: str | None = Field(None, description="source sentences, one a line (plain, .gz or .xz)")
    target: str | None = Field(None, description="target sentences, line by line beside the source")
    pairs: str | None = Field(None, description="instead of two files: .tsv (source, tab, target) or .jsonl")
    count: int | None = Field(None, ge=1, description="how many pairs to use; all, or the corpus's own, if not set")
    weight: float = Field(1.0, gt=0, description="how often an epoch visits each pair (0.5: a random half)")
    source_tag: str | None = Field(None, description="a tag put in front of every source, such as <2de>")
    target_tag: str | None = Field(None, description="a tag every target begins with")

    @model_validator(mode="after")
    def _one_kind(self) -> Corpus:
        kinds = [self.corpus, self.pairs, self.source or self.target]
        if sum(kind is not None for kind in kinds) > 1:
            raise ValueError("give one of corpus, pairs, or source with target")
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target go together")
        return self

    @property
    def given(self) -> bool:
        return any(part is not None for part in (self.corpus, self.pairs, self.source))


Files = Annotated[list[str], Field(min_length=1, max_length=2)]


class Data(Corpus):
    """Where the sentence pairs come from."""

    mix: list[Corpus] = Field([], description="several corpora instead of one: [[data.mix]] tables with weights")
    valid: Files | None = Field(None, description="held-out pairs watched in training: [source, target] or [pairs]")
    test: Files | None = Field(None, description="held-out pairs for regard evaluate: [source, target] or [pairs]")
    folder: str | None = Field(None, description="where relative file names are looked up; --data sets it")
    lowercase: bool = Field(False, description="lower-case both sides (scores then compare with lower-cased ones only)")
    max_length: int = Field(256, ge=2, description="drop pairs longer than this (or than max_positions) on either side")

    @model_validator(mode="after")
    def _some_data(self) -> Data:
        if self.given == bool(self.mix):
            raise ValueError("give training data either directly (corpus, source and target, or pairs) or in mix")
        if not all(corpus.given for corpus in self.mix):
            raise ValueError("every entry of mix needs a corpus, pairs, or source with target")
        return self


class Text(Settings):
    """How text becomes tokens."""

    unit: Literal["bpe", "char", "word"] = Field("bpe", description="byte-level BPE (lossless), characters, or words")
    vocabulary: int = Field(8000, ge=260, description="most tokens in a vocabulary, special ones included")
    shared: bool = Field(True, description="one vocabulary for both sides")
    sample: int = Field(1_000_000, ge=1, description="learn the vocabulary from at most this many pairs, drawn by seed")


class TransformerSettings(Settings):
    """The encoder-decoder of "Attention Is All You Need"."""

    family: Literal["transformer"] = Field("transformer", description="the kind of model")
    size: Literal["tiny", "small", "base", "big"] = Field("small", description="a preset for the fields below")
    width: int = Field(..., ge=2, description="features of a token")
    heads: int = Field(..., ge=1, description="attention heads; they share the width")
    encoder_layers: int = Field(..., ge=1, description="blocks that read the source")
    decoder_layers: int = Field(..., ge=1, description="blocks that write the target")
    inner: int = Field(..., ge=1, description="hidden features of the feed-forward layers")
    dropout: float = Field(..., ge=0, lt=1, description="on embeddings and on what each sub-layer adds")
    activation: Literal["relu", "gelu", "gated"] = Field("relu", description="inside the feed-forward layers")
    norm: Literal["layer", "rms", "batch"] = Field("layer", description="which normalisation")
    norm_first: bool = Field(True, description="normalise before each sub-layer (steadier); the paper did it after")
    positions: Literal["sinusoidal", "learned", "index", "fraction"] = Field(
        "sinusoidal", description="how a token knows where it stands"
    )
    position_base: float = Field(10000.0, gt=1, description="longest sinusoid wavelength is this times 2 pi")
    max_positions: int = Field(1024, ge=2, description="longest sentence in tokens")
    tied: bool = Field(True, description="output projection = target embedding (= source embedding if shared)")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        """Fields that are not given come from the preset that `size` names."""
        if not isinstance(given, dict):
            return given
        size = given.get("size", "small")
        return {**(PRESETS.get(size, {}) if isinstance(size, str) else {}), **given}

    @model_validator(mode="after")
    def _heads_share(self) -> TransformerSettings:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


ModelSettings = TransformerSettings


Rate = Annotated[float, Field(ge=0, lt=1)]


class Training(Settings):
    """How the weights are found."""

    steps: int = Field(10000, ge=1, description="updates, counted from the very first (a resumed run goes on to this)")
    batch_tokens: int = Field(4096, ge=16, description="target tokens a batch; the source row's budget follows")
    pool: int = Field(64, ge=1, description="batches sorted by length together: more pads less, fewer mixes better")
    accumulate: int = Field(1, ge=1, description="batches summed into one update")
    optimizer: Literal["adam", "adamw"] = Field("adam", description="adamw decays weights apart from the gradient")
    learning_rate: float | None = Field(
        None, gt=0, le=100, description="peak; not set: 1 / sqrt(width * warmup), the paper's"
    )
    schedule: Literal["noam", "cosine", "linear", "constant"] = Field("noam", description="shape after the warm-up")
    warmup: int = Field(4000, ge=1, description="steps of linear warm-up")
    betas: tuple[Rate, Rate] = Field((0.9, 0.98), description="Adam's decay rates")
    weight_decay: float = Field(0.0, ge=0, description="adamw only, on matrices")
    clip: float = Field(1.0, ge=0, description="longest gradient; 0: never clipped")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="probability spread over the whole vocabulary")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 on a GPU, fp32 on a CPU")
    checkpoint_activations: bool = Field(False, description="recompute blocks in the backward pass: less memory")
    ema: float = Field(0.0, ge=0, lt=1, description="decay of a running average of the weights; 0: none")
    average: int = Field(5, ge=0, description="at the end also try the mean of this many last snapshots; 0: no")
    validate_every: int = Field(500, ge=1, description="steps between looks at the held-out pairs")
    validate_lines: int = Field(200, ge=0, description="held-out sentences translated for BLEU at each look; 0: none")
    best: Literal["bleu", "loss"] = Field("loss", description="what picks the weights that are kept")
    patience: int = Field(0, ge=0, description="stop after this many looks without a better one; 0: never")
    save_every: int = Field(500, ge=1, description="steps between snapshots and resume states")
    seed: int = Field(1, ge=0, description="of weights, order and dropout")
    tensorboard: bool = Field(False, description="also write TensorBoard files (needs regard[tensorboard])")

    @model_validator(mode="after")
    def _something_to_judge_by(self) -> Training:
        if self.best == "bleu" and not self.validate_lines:
            raise ValueError('best = "bleu" needs validate_lines of at least 1')
        return self


class Decoding(Settings):
    """How a translation is searched for, unless the command line says otherwise."""

    method: Literal["beam", "sample"] = Field("beam", description="beam search (1 beam: greedy), or sampling")
    beam: int = Field(4, ge=1, description="hypotheses kept; 1 is greedy")
    length_penalty: float = Field(0.6, ge=0, description="GNMT's alpha; 0 favours short output")
    early_stopping: bool = Field(True, description="stop when no unfinished hypothesis can still win")
    max_ratio: float = Field(2.0, gt=0, description="longest output: this times the source's tokens ...")
    max_extra: int = Field(20, ge=0, description="... plus this many")
    min_length: int = Field(0, ge=0, description="fewest tokens before the end mark")
    no_repeat: int = Field(0, ge=0, description="never repeat an n-gram of this length; 0: may")
    temperature: float = Field(1.0, gt=0, description="sampling: below 1 is more careful")
    top_k: int = Field(0, ge=0, description="sampling: only the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="sampling: only the likeliest tokens that reach this probability")
    batch_tokens: int = Field(4096, ge=1, description="source tokens translated at once; changes speed, not results")


class Recipe(Settings):
    """Everything that makes a run what it is."""

    about: str = Field("", description="what this recipe is for")
    data: Data
    text: Text = Field(default_factory=lambda: Text())
    model: ModelSettings = Field(default_factory=lambda: TransformerSettings.model_validate({}))
    training: Training = Field(default_factory=lambda: Training())
    decoding: Decoding = Field(default_factory=lambda: Decoding())
