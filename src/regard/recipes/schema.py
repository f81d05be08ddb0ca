"""A recipe: data, text, model, training and decoding settings, checked strictly.

Every field's description is the comment that `regard recipes NAME` prints beside it, so this file is also the manual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from regard.registry import (
    ACTIVATIONS,
    CORPORA,
    MODELS,
    NORMS,
    OPTIMIZERS,
    POSITIONS,
    SCHEDULES,
    SCORES,
    TASKS,
    NameIn,
)

LARGEST_INTEGER = 2**53  # what JSON keeps exactly; tensors and random generators take no more than 2^63


class SettingsModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        if isinstance(value, int) and value > LARGEST_INTEGER:
            raise ValueError(f"must be at most {LARGEST_INTEGER}")
        return value


class Corpus(SettingsModel):
    """One body of sentence pairs: a built-in one, two line-aligned files, or one file of pairs."""

    corpus: str | None = Field(None, description="a built-in corpus: en-es, stories, moods, copy, reverse, sort")
    source: str | None = Field(None, description="source sentences, one a line (plain, .gz or .xz)")
    target: str | None = Field(None, description="target sentences, line by line beside the source")
    pairs: str | None = Field(None, description="instead of two files: one .tsv, .csv or .jsonl file of pairs")
    text: str | None = Field(None, description="instead of pairs: a file of plain text, for gpt and bert")
    format: Literal["auto", "tsv", "csv", "jsonl", "text"] = Field(
        "auto", description="of files of pairs, and of text in columns; auto: as their names end"
    )
    columns: list[Annotated[int, Field(ge=1)] | str] | None = Field(
        None, description='names, or numbers from 1, of the columns to read: ["de", "en"]; of plain text one'
    )
    quoted: bool | None = Field(
        None, description='fields may be quoted, with "" for a "; not set: in .csv, and in .tsv that is so throughout'
    )
    header: bool | None = Field(
        None, description="the first line of .tsv and .csv names the columns; not set: where it has usual names"
    )
    count: int | None = Field(None, ge=1, description="how many pairs to use; all, or the corpus's own, if not set")
    weight: float = Field(1.0, gt=0, description="how often an epoch visits each pair (0.5: a random half)")
    source_tag: str | None = Field(None, description="a tag put in front of every source, such as <2de>")
    target_tag: str | None = Field(None, description="a tag every target begins with")

    @model_validator(mode="after")
    def _one_kind(self) -> Corpus:
        kinds = [self.corpus, self.pairs, self.text, self.source or self.target]
        if sum(kind is not None for kind in kinds) > 1:
            raise ValueError("give one of corpus, pairs, text, or source with target")
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target go together")
        wanted = 1 if self.text is not None else 2
        if self.columns is not None and self.given and len(self.columns) != wanted:
            raise ValueError(f"columns names {wanted} for {'plain text' if wanted == 1 else 'pairs'}")
        if self.pairs is not None and self.format == "text":
            raise ValueError('format = "text" is for plain text; pairs are in "tsv", "csv" or "jsonl"')
        return self

    @property
    def given(self) -> bool:
        return any(part is not None for part in (self.corpus, self.pairs, self.text, self.source))

    @property
    def kind(self) -> str:
        """What the examples are: "pairs" of texts, plain "text", or the kind of a built-in corpus, such as "images"."""
        if self.text is not None or self.corpus in PLAIN_CORPORA:
            return "text"
        return str(CORPORA[self.corpus].kind) if self.corpus is not None and self.corpus in CORPORA else "pairs"

    @property
    def plain(self) -> bool:
        """Whether this is plain text: documents, not pairs."""
        return self.kind == "text"


PLAIN_CORPORA = ("stories",)  # built-in ones
Files = Annotated[list[str], Field(min_length=1, max_length=2)]


class DataSettings(Corpus):
    """Where the sentence pairs, or the texts, come from."""

    mix: list[Corpus] = Field([], description="several corpora instead of one: [[data.mix]] tables with weights")
    imported: Literal["pairs", "text"] | None = Field(
        None, description="no data (yet): the weights were imported, and are for pairs or for plain text"
    )
    valid: Files | None = Field(
        None, description="held out and watched in training: [source, target], [pairs] or [text]"
    )
    test: Files | None = Field(None, description="held out for regard evaluate: as valid; []: none")
    documents: Literal["line", "paragraph", "stream"] = Field(
        "paragraph", description="plain text: a document a line, between blank lines, or one stream cut into windows"
    )
    held_out: float = Field(
        0.0, ge=0, lt=1, description="plain text without valid or test: the share at its end that is held out"
    )
    folder: str | None = Field(None, description="where relative file names are looked up; --data sets it")
    lowercase: bool = Field(False, description="lower-case both sides (scores then compare with lower-cased ones only)")
    max_length: int = Field(256, ge=2, description="drop pairs longer than this (or than max_positions) on either side")

    @field_validator("test", mode="before")
    @classmethod
    def _no_test(cls, given: Any) -> Any:
        """An empty list drops an inherited test set."""
        return None if given == [] else given

    @model_validator(mode="after")
    def _some_data(self) -> DataSettings:
        if (self.given and self.mix) or not (self.given or self.mix or self.imported):
            raise ValueError("give training data either directly (corpus, source and target, pairs, or text) or in mix")
        if not all(corpus.given for corpus in self.mix):
            raise ValueError("every entry of mix needs a corpus, pairs, text, or source with target")
        if len(kinds := sorted({corpus.kind for corpus in self.mix})) > 1:
            raise ValueError(f"mix has {' and '.join(kinds)}: all its corpora must be of one kind")
        if self.held_out and all(corpus.text is None for corpus in (self.mix or [self])):
            raise ValueError("held_out is for files of plain text: other data name valid and test, or have their own")
        return self

    @property
    def kind(self) -> str:
        if self.mix:
            return self.mix[0].kind
        return super().kind if self.given else self.imported or "pairs"

    @property
    def has_tokens(self) -> bool:
        """Whether the data are texts, which tokenizers read."""
        return self.kind in ("pairs", "text")


Unit = Literal["bpe", "char", "word", "wordpiece", "sentencepiece"]


class TextSettings(SettingsModel):
    """How text becomes tokens."""

    unit: Unit = Field(
        "bpe", description="byte-level BPE (lossless), characters, or words; imported: wordpiece, sentencepiece"
    )
    vocabulary: int = Field(8000, ge=260, description="most tokens in a vocabulary, special ones included")
    shared: bool = Field(True, description="one vocabulary for both sides")
    target_unit: Unit | None = Field(
        None, description="another unit for the target, where the vocabulary is not shared"
    )
    sample: int = Field(1_000_000, ge=1, description="learn the vocabulary from at most this many pairs, drawn evenly")

    @model_validator(mode="after")
    def _one_unit_for_one_vocabulary(self) -> TextSettings:
        if self.shared and self.target_unit not in (None, self.unit):
            raise ValueError("target_unit needs shared = false: one vocabulary has one unit")
        return self


Activation = Annotated[str, NameIn(ACTIVATIONS)]
ScoreName = Annotated[str, NameIn(SCORES)]
PositionsName = Annotated[str, NameIn(POSITIONS, where=lambda positions: not positions.needs_length)]
TokenNorm = Annotated[str, NameIn(NORMS, where=lambda norm: not norm.mixes_tokens)]


class SizedSettings(SettingsModel):
    """The settings of a model family: fields that are not given come from the preset that `size` names.

    A family's class adds its fields; the Transformer's shows how. All have those under `TYPE_CHECKING`.
    """

    if TYPE_CHECKING:
        family: str
        size: str
        width: int
        dropout: float
        max_positions: int

    PRESETS: ClassVar[dict[str, dict[str, Any]]]
    USUAL: ClassVar[str]
    shares_context: ClassVar[bool] = False  # whether source and target share max_positions, and do not have it each
    adds_bos: ClassVar[bool] = False  # whether every input starts with BOS
    extra_tags: ClassVar[tuple[str, ...]] = ()  # of the source vocabulary
    TASKS: ClassVar[tuple[str, ...]]  # that the family can be trained for

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that a model with these settings can be trained for."""
        return self.TASKS

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        """How many layers read the input, and how many write the output."""
        raise NotImplementedError  # implemented by each family

    def forward_flops(self, batch: Any, target_size: int) -> int:
        """FLOPs of the matmuls of a forward pass; `target_size`: of the target vocabulary, or the number of classes."""
        raise NotImplementedError  # implemented by each family

    def in_words(self) -> str:
        """The model in a few words, for tables: its family, and what matters most within it."""
        return self.family

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        size = given.get("size", cls.USUAL)
        return {**(cls.PRESETS.get(size, {}) if isinstance(size, str) else {}), **given}

    @model_validator(mode="after")
    def _heads_share(self) -> SizedSettings:
        width, heads = getattr(self, "width", 1), getattr(self, "heads", 1)
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        positions = getattr(self, "positions", "none")
        if positions == "rotary" and (width // heads) % 2:
            raise ValueError(
                f"rotary positions rotate pairs of features, and the width of a head, {width // heads}, is odd"
            )
        if positions in ("rotary", "relative") and getattr(self, "score", None) != "scaled-dot":
            raise ValueError(f'{positions} positions are part of a scaled dot product: score must be "scaled-dot"')
        return self


def families() -> dict[str, type[SizedSettings]]:
    """The settings class of every model family, by its name."""
    return {name: MODELS[name].Settings for name in sorted(MODELS)}


def _family(given: Any) -> str:
    """Which settings a [model] section is checked against; the Transformer's where it does not say."""
    return str(given.get("family", "transformer") if isinstance(given, dict) else getattr(given, "family", ""))


class _AnyFamily:
    """Checks a [model] section against the settings of the family that it names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged = tuple(Annotated[settings, Tag(name)] for name, settings in families().items())
        return handler.generate_schema(Annotated[Union[tagged], Discriminator(_family)])  # noqa: UP007


ModelSettings = Annotated[SizedSettings, _AnyFamily()]


Rate = Annotated[float, Field(ge=0, lt=1)]


class TrainingSettings(SettingsModel):
    """How the weights are found."""

    steps: int = Field(10000, ge=1, description="updates, counted from the very first (a resumed run goes on to this)")
    batch_tokens: int = Field(4096, ge=16, description="target tokens a batch; the source row's budget follows")
    sort_buffer: int = Field(
        64, ge=1, description="batches sorted by length together: more pads less, fewer mixes better"
    )
    accumulate: int = Field(1, ge=1, description="batches summed into one update")
    optimizer: Annotated[str, NameIn(OPTIMIZERS)] = Field(
        "adam", description="adamw decays weights apart from the gradient; muon: orthogonal steps for linear layers"
    )
    learning_rate: float | None = Field(
        None, gt=0, le=100, description="peak; not set: 1 / sqrt(width * warmup), the paper's"
    )
    schedule: Annotated[str, NameIn(SCHEDULES)] = Field(
        "noam", description="shape after the warm-up (stable: the peak, then a linear fall at the end)"
    )
    warmup: int = Field(4000, ge=1, description="steps of linear warm-up")
    cooldown: float = Field(0.4, gt=0, le=1, description='share of the steps in which schedule = "stable" falls')
    final_rate: float = Field(0.0, ge=0, le=1, description="cosine, linear and stable fall to this share of the peak")
    betas: tuple[Rate, Rate] = Field((0.9, 0.98), description="Adam's decay rates")
    weight_decay: float = Field(0.0, ge=0, description="adamw and muon, on matrices")
    max_grad_norm: float = Field(1.0, ge=0, description="longest gradient; 0: never clipped")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="probability spread over the whole vocabulary")
    r_drop: float = Field(
        0.0,
        ge=0,
        description="R-Drop: read batches twice, dropped out differently, and weigh what differs; 0: once",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 on a GPU, fp32 on a CPU")
    backend: Literal["auto", "plain", "captured", "compiled"] = Field(
        "auto", description="how updates run; auto: on a GPU captured as a graph, and for long jobs compiled"
    )
    checkpoint_activations: bool = Field(False, description="recompute blocks in the backward pass: less memory")
    ema: float = Field(0.0, ge=0, lt=1, description="decay of a running average of the weights; 0: none")
    average: int = Field(5, ge=0, description="at the end also try the mean of this many last snapshots; 0: no")
    validate_every: int = Field(500, ge=1, description="steps between looks at the held-out pairs")
    validate_lines: int = Field(200, ge=0, description="held-out sentences translated for BLEU at each look; 0: none")
    best: Literal["bleu", "exact", "loss"] = Field("loss", description="what picks the weights that are kept")
    patience: int = Field(0, ge=0, description="stop after this many looks without a better one; 0: never")
    save_every: int = Field(500, ge=1, description="steps between snapshots and resume states")
    save_minutes: float = Field(
        5.0, ge=0, description="also save a resume state when the last one is this old; 0: by steps alone"
    )
    seed: int = Field(1, ge=0, description="of weights, order and dropout")
    tensorboard: bool = Field(False, description="also write TensorBoard files (needs regard[tensorboard])")

    @model_validator(mode="after")
    def _something_to_judge_by(self) -> TrainingSettings:
        if self.best != "loss" and not self.validate_lines:
            raise ValueError(f'best = "{self.best}" needs validate_lines of at least 1')
        return self


class DecodingSettings(SettingsModel):
    """How a translation is searched for, unless the command line says otherwise."""

    method: Literal["beam", "sample"] = Field("beam", description="beam search (1 beam: greedy), or sampling")
    beam: int = Field(4, ge=1, description="hypotheses kept; 1 is greedy")
    length_penalty: float = Field(0.6, ge=0, description="GNMT's alpha; 0 favours short output")
    early_stopping: bool = Field(True, description="stop when no unfinished hypothesis can still win")
    max_ratio: float = Field(2.0, gt=0, description="longest output: this times the source's tokens ...")
    max_extra: int = Field(20, ge=0, description="... plus this many")
    min_length: int = Field(0, ge=0, description="fewest tokens before the end mark")
    no_repeat_ngram: int = Field(0, ge=0, description="never repeat an n-gram of this length; 0: may")
    repetition_penalty: float = Field(1.0, ge=1, description="above 1: what was said already is less likely again")
    temperature: float = Field(1.0, gt=0, description="sampling: below 1 is more careful")
    top_k: int = Field(0, ge=0, description="sampling: only the k likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="sampling: only the likeliest tokens that reach this probability")
    batch_tokens: int = Field(4096, ge=1, description="source tokens translated at once; changes speed, not results")


class Recipe(SettingsModel):
    """Everything that makes a run what it is."""

    model_config = ConfigDict(defer_build=True)  # until it is first used: then all model families are known

    about: str = Field("", description="what this recipe is for")
    task: Annotated[str, NameIn(TASKS)] = Field("", validate_default=False, description="what the model learns")
    data: DataSettings
    text: TextSettings = Field(default_factory=lambda: TextSettings())
    model: ModelSettings = Field(default_factory=lambda: families()["transformer"].model_validate({}))
    training: TrainingSettings = Field(default_factory=lambda: TrainingSettings())
    decoding: DecodingSettings = Field(default_factory=lambda: DecodingSettings())

    @model_validator(mode="after")
    def _readings_differ(self) -> Recipe:
        if self.training.r_drop and not self.model.dropout:
            raise ValueError("training.r_drop compares readings that dropout makes differ: model.dropout must not be 0")
        return self

    @model_validator(mode="after")
    def _task_suits(self) -> Recipe:
        if not self.task:
            tasks = [name for name in self.model.tasks if TASKS[name].data == self.data.kind] or self.model.tasks[:1]
            if len(tasks) > 1:
                raise ValueError(f"task is missing: {' or '.join(tasks)}")
            object.__setattr__(self, "task", tasks[0])
        TASKS[self.task].check(self)
        return self
