"""The settings of a recipe: data, text, model, training and decoding. Unknown keys and invalid values are errors.

`regard recipes NAME` prints every field with its description: the reference of all settings. The settings of a model
family are in its module in `models`.
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

from regard.arguments import MAX_BEAM
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

LARGEST_INTEGER = 2**53  # JSON stores these exactly; tensors and random generators take at most 2^63


class SettingsModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        if isinstance(value, int) and value > LARGEST_INTEGER:
            raise ValueError(f"must be at most {LARGEST_INTEGER}")
        return value


Names = str | list[str]  # names of files


class Corpus(SettingsModel):
    """One corpus: a built-in one, line-aligned files, files of pairs, or files of plain text.

    Files are named by a name, a glob such as "train.en*.gz", or a list of them.
    """

    corpus: str | None = Field(
        None,
        description="built-in corpus: en-es, stories, moods, shapes, clutter, scenes, scenes-es, scenes-parts, "
        "scenes-parts-es, citations, molecules, smiles, key-door, tones, copy, reverse or sort",
    )
    source: Names | None = Field(
        None, description="source sentences, one per line (plain, .gz, .xz or .zst); a file, a glob, or a list of them"
    )
    target: Names | None = Field(None, description="target sentences, line-aligned with source, in as many files")
    pairs: Names | None = Field(
        None,
        description="instead of source and target: pairs (.tsv, .csv, .jsonl, .parquet, or a folder of datasets)",
    )
    text: Names | None = Field(
        None, description="instead of pairs: plain text, for language models and masked language models"
    )
    graph: str | None = Field(
        None, description="a graph, to classify its nodes: an .npz file, or a folder with nodes.tsv and edges.tsv"
    )
    molecules: Names | None = Field(
        None, description="molecules as graphs: files of pairs of SMILES and a number (needs regard[chemistry])"
    )
    images: Names | None = Field(
        None,
        description="images to classify: a folder with a folder for each class; a .tsv or .csv file of image files and "
        "classes; an .npz file of images and labels; or an idx file, as MNIST has (see docs/vision.md)",
    )
    captions: Names | None = Field(
        None,
        description="images and their captions: .tsv, .csv or .jsonl files of image files, relative to the file, and "
        "texts (see docs/captioning.md)",
    )
    trajectories: str | None = Field(
        None, description="episodes to learn to act from: an .npz or a Parquet file (see regard collect)"
    )
    speech: Names | None = Field(
        None,
        description="recordings and their texts: a TSV manifest (file, text, optionally split and speaker), or an "
        "archive (.tar, .tar.xz) with one (needs regard[audio])",
    )
    format: Literal["auto", "tsv", "csv", "jsonl", "parquet", "text"] = Field(
        "auto", description="format of pairs or text; auto: by the file name"
    )
    columns: list[Annotated[int, Field(ge=1)] | str] | None = Field(
        None, description='columns to read, by name or number (from 1): ["de", "en"]; one column for plain text'
    )
    quoted: bool | None = Field(
        None, description="fields may be quoted, as in CSV; not set: true for .csv, detected for .tsv"
    )
    header: bool | None = Field(
        None, description="the first line of .tsv and .csv names the columns; not set: detected by common names"
    )
    count: int | None = Field(
        None, ge=1, description="number of examples to use, from the start; not set: all, or the corpus's default"
    )
    weight: float = Field(1.0, gt=0, description="how often an epoch visits each example (0.5: a random half)")
    source_tag: str | None = Field(None, description="tag before every source, such as <2de>")
    target_tag: str | None = Field(None, description="tag at the start of every target")

    @model_validator(mode="after")
    def _check_kind(self) -> Corpus:
        if [] in (self.source, self.target, self.text, self.images, *self.tables):
            raise ValueError("a list of files must not be empty")
        kinds = [self.corpus, self.text, self.images, self.source or self.target, *self.tables, *self.other_files]
        if sum(kind is not None for kind in kinds) > 1:
            choices = (
                "corpus, pairs, text, images, captions, speech, graph, molecules, trajectories, or source with target"
            )
            raise ValueError(f"give one of {choices}")
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target go together")
        wanted = 1 if self.text is not None else 2
        if self.columns is not None and self.given and len(self.columns) != wanted:
            raise ValueError(f"columns must have {'1 entry for plain text' if wanted == 1 else '2 entries for pairs'}")
        if self.pairs is not None and self.format == "text":
            raise ValueError('format = "text" is for plain text; for pairs it is "tsv", "csv", "jsonl" or "parquet"')
        return self

    @property
    def given(self) -> bool:
        given = (*self.tables, *self.other_files, self.corpus, self.text, self.images, self.source)
        return any(part is not None for part in given)

    @property
    def tables(self) -> tuple[Names | None, ...]:
        """The files of pairs, if any: of texts, of molecules, of images and captions, or of recordings and texts."""
        return self.pairs, self.molecules, self.captions, self.speech

    @property
    def other_files(self) -> tuple[str | None, str | None]:
        """The file of a graph or of trajectories, if any."""
        return self.graph, self.trajectories

    @property
    def kind(self) -> str:
        """The kind of examples: "pairs" of texts, plain "text", a "graph", or that of a built-in corpus."""
        if self.text is not None or self.corpus in PLAIN_CORPORA:
            return "text"
        for kind in ("graph", "molecules", "trajectories", "images", "captions", "speech"):
            if getattr(self, kind) is not None:
                return kind
        return str(CORPORA[self.corpus].kind) if self.corpus is not None and self.corpus in CORPORA else "pairs"

    @property
    def plain(self) -> bool:
        """Whether this is plain text: documents, not pairs."""
        return self.kind == "text"


PLAIN_CORPORA = ("stories",)  # built-in corpora of plain text
OPTIONAL_SECTIONS = ("text", "decoding", "augment")  # sections that some tasks do not have (`Task.sections`)
TEXT_SETTINGS = (  # settings of [data] that have an effect only where the examples are texts
    *("source", "target", "text", "quoted", "source_tag", "target_tag"),
    *("documents", "held_out", "split_seed", "spellings", "lowercase", "max_length"),
)
TABLE_SETTINGS = ("quoted", "held_out", "split_seed")  # settings of tables that apply to molecules and images too
# Kinds of data whose inputs are files and whose targets are texts: the names of the columns of their tables.
MANIFESTS = {"captions": ("image", "caption"), "speech": ("file", "text")}
SPEECH_SETTINGS = ("join", "speeds", "test_speakers", "language", "speech_task")  # effective for recordings only
CAPTION_SETTINGS = ("masked_word",)  # effective for captions only
MANIFEST_SETTINGS = (*TABLE_SETTINGS, "lowercase", "max_length")
Files = Annotated[list[str], Field(min_length=1, max_length=2)]


class DataSettings(Corpus):
    """The training, validation and test data."""

    mix: list[Corpus] = Field([], description="several corpora instead of one: [[data.mix]] tables, each with a weight")
    imported: Literal["pairs", "text", "images", "speech"] | None = Field(
        None, description="the weights were imported without data; the kind of data that the model takes"
    )
    valid: Files | None = Field(
        None, description="validation files, as for training: [source, target], [pairs] or [text]"
    )
    test: Files | None = Field(
        None, description="test files for regard evaluate, as valid; []: drop those of an extended recipe"
    )
    documents: Literal["line", "paragraph", "stream"] = Field(
        "paragraph", description="plain text: each line is a document, or each paragraph, or all is one stream"
    )
    held_out: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction that is held out, if valid or test is not set: the end of plain text; of pairs, "
        "molecules, images and recordings a random one for each",
    )
    split_seed: int = Field(0, ge=0, description="held_out of pairs, molecules and images: seed of the random choice")
    spellings: int = Field(
        0, ge=0, description="pairs of SMILES and a label: train on this many random spellings of each molecule too"
    )
    join: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="speech: join recordings of one speaker, at least and at most so many, drawn by split_seed; count "
        "is how many to train on (not set: as many as recordings)",
    )
    speeds: list[Annotated[float, Field(ge=0.5, le=2)]] = Field(
        [],
        description="speech: train on a copy of each recording at each of these speeds, such as 0.9; none: as it is",
    )
    test_speakers: list[str] = Field(
        [], description="speech: test on all recordings of these speakers, and train on none of them"
    )
    language: str | None = Field(
        None,
        description='speech, with model.prompt = "whisper": language of the recordings, such as "en"; not set: it is '
        "detected in transcription",
    )
    speech_task: Literal["transcribe", "translate"] = Field(
        "transcribe",
        description="speech, with a prompt: the texts are in the language of the recordings, or in English",
    )
    folder: str | None = Field(None, description="folder of relative file names; --data sets it")
    classes: list[str] = Field(
        [], description="names of the classes 0, 1, ... of .npz and idx files; []: the file's own, or the numbers"
    )
    masked_word: str | None = Field(
        None,
        min_length=1,
        description='captions: word that stands for a missing one, such as "___": its loss is masked, and the model '
        "reads the unknown token instead",
    )
    lowercase: bool = Field(False, description="lower-case all text (comparable with lower-cased scores only)")
    max_length: int = Field(256, ge=2, description="maximum tokens of a source or target; longer pairs are dropped")

    @field_validator("test", mode="before")
    @classmethod
    def _drop_test(cls, given: Any) -> Any:
        """Read an empty list as no test set, so that a recipe can drop an inherited one."""
        return None if given == [] else given

    @model_validator(mode="after")
    def _check_data(self) -> DataSettings:
        if (self.given and self.mix) or not (self.given or self.mix or self.imported):
            raise ValueError("give training data either directly (corpus, source and target, pairs, or text) or in mix")
        if not all(corpus.given for corpus in self.mix):
            raise ValueError("every entry of mix needs a corpus, pairs, text, or source with target")
        if len(kinds := sorted({corpus.kind for corpus in self.mix})) > 1:
            raise ValueError(f"mix has {' and '.join(kinds)}: all its corpora must be of one kind")
        if self.mix and self.count is not None:
            raise ValueError("count has no effect on a mix: set it in the entries of mix, or name one corpus instead")
        files = [name for corpus in (self.mix or [self]) for name in (*corpus.tables, corpus.text, corpus.images)]
        if self.held_out and all(name is None for name in files):
            raise ValueError(
                "held_out is for files of plain text, pairs, molecules or images; for others, set valid and test"
            )
        if self.held_out >= 0.5 and self.kind != "text":
            raise ValueError("held_out is held out twice, for valid and for test: it must be below 0.5")
        return self

    @property
    def kind(self) -> str:
        if self.mix:
            return self.mix[0].kind
        return super().kind if self.given else self.imported or "pairs"

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings that have no effect for this kind of examples."""
        if self.kind in ("pairs", "text"):
            return ("classes", *SPEECH_SETTINGS, *CAPTION_SETTINGS)
        tables = TABLE_SETTINGS if self.kind in ("molecules", "images") else ()
        used = MANIFEST_SETTINGS if self.kind in MANIFESTS else tables
        texts = tuple(name for name in TEXT_SETTINGS if name not in used)
        texts = texts if self.kind == "speech" else (*texts, *SPEECH_SETTINGS)
        texts = texts if self.kind == "captions" else (*texts, *CAPTION_SETTINGS)
        return texts if self.kind == "images" else (*texts, "classes")

    @property
    def has_tokens(self) -> bool:
        """Whether the data are texts, or the targets are, which need tokenizers."""
        return self.kind in ("pairs", "text", *MANIFESTS)


Unit = Literal["bpe", "char", "word", "wordpiece", "sentencepiece", "huggingface"]


class TextSettings(SettingsModel):
    """How text becomes tokens."""

    unit: Unit = Field("bpe", description="byte-level BPE, characters or words; other units only in imported models")
    vocabulary: int = Field(8000, ge=260, description="maximum size of a vocabulary, special tokens included")
    shared: bool = Field(True, description="one vocabulary for source and target")
    target_unit: Unit | None = Field(
        None, description="unit of the target vocabulary, if shared is false; not set: same as unit"
    )
    sample: int = Field(
        1_000_000, ge=1, description="maximum number of examples that the vocabulary is learned from, drawn at random"
    )

    @model_validator(mode="after")
    def _check_units(self) -> TextSettings:
        if self.shared and self.target_unit not in (None, self.unit):
            raise ValueError("target_unit needs shared = false: one vocabulary has one unit")
        return self


Activation = Annotated[str, NameIn(ACTIVATIONS)]
ScoreName = Annotated[str, NameIn(SCORES)]
PositionsName = Annotated[str, NameIn(POSITIONS, where=lambda positions: not positions.needs_length)]
TokenNorm = Annotated[str, NameIn(NORMS, where=lambda norm: not norm.mixes_tokens)]


class SizedSettings(SettingsModel):
    """The settings of a model family. Fields that are not set are taken from the preset that `size` names.

    Each family has a subclass with its fields, such as `TransformerSettings`; all have those under `TYPE_CHECKING`.
    """

    if TYPE_CHECKING:
        family: str
        size: str
        width: int
        dropout: float
        max_positions: int

    PRESETS: ClassVar[dict[str, dict[str, Any]]]
    DEFAULT_SIZE: ClassVar[str]
    shares_context: ClassVar[bool] = False  # whether max_positions limits source and target together, not each of them
    adds_bos: ClassVar[bool] = False  # whether every input starts with BOS
    extra_tags: ClassVar[tuple[str, ...]] = ()  # special tokens that the source vocabulary needs
    TASKS: ClassVar[tuple[str, ...]]  # tasks that the family can be trained for

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that a model with these settings can be trained for."""
        return self.TASKS

    @property
    def encoder_decoder_layers(self) -> tuple[int, int]:
        """The number of encoder layers and of decoder layers."""
        raise NotImplementedError  # implemented by each family

    @property
    def guided_head(self) -> tuple[int, int] | None:
        """The layer and head, from 0, that training.guided_alignment trains; None: the family has none."""
        return None

    def forward_flops(self, batch: Any, target_size: int) -> int:
        """FLOPs of the matmuls of a forward pass; `target_size`: of the target vocabulary, or the number of classes."""
        raise NotImplementedError  # implemented by each family

    def summary(self) -> str:
        """The family and its most important setting in a few words, for tables."""
        return self.family

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        size = given.get("size", cls.DEFAULT_SIZE)
        return {**(cls.PRESETS.get(size, {}) if isinstance(size, str) else {}), **given}

    @model_validator(mode="after")
    def _check_heads(self) -> SizedSettings:
        width, heads, head_width = getattr(self, "width", 1), getattr(self, "heads", 1), getattr(self, "head_width", 0)
        if not head_width and width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        positions, features = getattr(self, "positions", "none"), head_width or width // heads
        if positions == "rotary" and features % 2:
            name = "head_width" if head_width else "width / heads"
            raise ValueError(f"rotary positions need an even width of a head, which is {name} = {features}")
        if positions in ("rotary", "relative") and getattr(self, "score", None) != "scaled-dot":
            raise ValueError(f'positions = "{positions}" needs score = "scaled-dot"')
        return self


def families() -> dict[str, type[SizedSettings]]:
    """The settings class of every model family, by name."""
    return {name: MODELS[name].Settings for name in sorted(MODELS)}


def _family(given: Any) -> str:
    """The family that a [model] section names; by default the Transformer."""
    return str(given.get("family", "transformer") if isinstance(given, dict) else getattr(given, "family", ""))


class _AnyFamily:
    """Checks a [model] section against the settings of the family that it names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged = tuple(Annotated[settings, Tag(name)] for name, settings in families().items())
        return handler.generate_schema(Annotated[Union[tagged], Discriminator(_family)])  # noqa: UP007


ModelSettings = Annotated[SizedSettings, _AnyFamily()]


Rate = Annotated[float, Field(ge=0, lt=1)]


class TrainingSettings(SettingsModel):
    """Training: batches, optimizer, learning rate, validation, checkpoints."""

    steps: int = Field(10000, ge=1, description="total number of optimizer steps, also of a resumed run")
    batch_tokens: int = Field(
        4096, ge=16, description="target tokens per batch; tokens of texts or number of images to classify"
    )
    sort_buffer: int = Field(
        64,
        ge=1,
        description="batches whose examples are sorted by length together: more means less padding, less mixing",
    )
    accumulate: int = Field(1, ge=1, description="gradient accumulation: batches per step")
    optimizer: Annotated[str, NameIn(OPTIMIZERS)] = Field(
        "adam",
        description="optimizer; adamw has decoupled weight decay, muon is for linear layers, with adamw for the rest",
    )
    learning_rate: float | None = Field(
        None, gt=0, le=100, description="peak learning rate; not set: 1 / sqrt(width * warmup), as in the paper"
    )
    schedule: Annotated[str, NameIn(SCHEDULES)] = Field(
        "noam", description="learning rate after the warm-up; stable: constant, then a linear cooldown"
    )
    warmup: int = Field(4000, ge=1, description="steps of linear warm-up")
    cooldown: float = Field(0.4, gt=0, le=1, description='schedule = "stable": fraction of the steps that is cooldown')
    final_rate: float = Field(
        0.0, ge=0, le=1, description="cosine, linear, stable: final learning rate as a fraction of the peak"
    )
    betas: tuple[Rate, Rate] = Field((0.9, 0.98), description="beta1 and beta2 of Adam")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, on matrices only; with adam it is an L2 penalty")
    max_grad_norm: float = Field(1.0, ge=0, description="clip the gradient to this norm; 0: no clipping")
    adapter: Literal["none", "lora"] = Field(
        "none", description="lora: train low-rank adapters only, beside the frozen weights of --from"
    )
    adapter_rank: int = Field(8, ge=1, description="lora: rank r of the adapters")
    adapter_alpha: float = Field(16.0, gt=0, description="lora: what adapters add is multiplied by alpha / r")
    adapter_targets: list[Literal["query", "key", "value", "out", "ffn_in", "ffn_out"]] = Field(
        ["query", "value"], min_length=1, description="lora: the matrices of each block that have adapters"
    )
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="probability that is spread over the whole vocabulary")
    r_drop: float = Field(
        0.0,
        ge=0,
        description="R-Drop: weight of the KL divergence between two passes with different dropout; 0: off",
    )
    guided_alignment: str | None = Field(
        None,
        description="links for one cross-attention head to learn: a Pharaoh file with a line for each training pair, "
        'or "own": links by the attention of the run of --from; not set: none',
    )
    guided_weight: float = Field(0.05, gt=0, description="weight of guided_alignment in the loss")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="floating-point type; auto: bf16 on a GPU, fp32 on a CPU"
    )
    backend: Literal["auto", "plain", "captured", "compiled"] = Field(
        "auto", description="how steps run; auto: on a GPU as a CUDA graph, compiled for long trainings"
    )
    checkpoint_activations: bool = Field(
        False, description="recompute activations in the backward pass: less memory, slower"
    )
    parallel: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description="several devices: ddp, each holds the whole model; fsdp, each a part; auto: ddp if the model fits",
    )
    reshard: bool = Field(
        True, description="fsdp: free a block's gathered weights after its forward pass: less memory, slower"
    )
    timeout: float = Field(
        600.0, gt=0, description="several devices: seconds after which a process that does not answer ends the job"
    )
    ema: float = Field(0.0, ge=0, lt=1, description="decay of an exponential moving average of the weights; 0: off")
    average: int = Field(5, ge=0, description="at the end, also validate the average of the last N snapshots; 0: off")
    validate_every: int = Field(500, ge=1, description="steps between validations")
    validate_lines: int = Field(
        200, ge=0, description="examples decoded at each validation, for BLEU, exact match and samples; 0: none"
    )
    best: Literal["bleu", "exact", "loss"] = Field(
        "loss", description="validation measure that selects the best weights"
    )
    patience: int = Field(0, ge=0, description="stop after this many validations without improvement; 0: never")
    save_every: int = Field(500, ge=1, description="steps between checkpoints")
    save_minutes: float = Field(
        5.0,
        ge=0,
        description="also save the state for resuming when the last is this many minutes old; 0: by steps only",
    )
    seed: int = Field(1, ge=0, description="random seed of initialisation, data order and dropout")
    tensorboard: bool = Field(False, description="also write TensorBoard logs (needs regard[tensorboard])")

    @model_validator(mode="after")
    def _check_best(self) -> TrainingSettings:
        if self.best != "loss" and not self.validate_lines:
            raise ValueError(f'best = "{self.best}" needs validate_lines of at least 1')
        return self


class DecodingSettings(SettingsModel):
    """Defaults of search and sampling; options of the command line override them."""

    method: Literal["beam", "sample"] = Field("beam", description="beam search or sampling")
    beam: int = Field(4, ge=1, le=MAX_BEAM, description="beam size; 1: greedy search")
    length_penalty: float = Field(
        0.6, ge=0, description="exponent of the length penalty (alpha of GNMT); larger favours longer output"
    )
    early_stopping: bool = Field(True, description="stop when no live hypothesis can become the best")
    max_ratio: float = Field(2.0, gt=0, description="maximum output length: max_ratio * source tokens + max_extra")
    max_extra: int = Field(20, ge=0, description="see max_ratio")
    min_length: int = Field(0, ge=0, description="minimum number of output tokens")
    no_repeat_ngram: int = Field(0, ge=0, description="never repeat an n-gram of this length; 0: off")
    repetition_penalty: float = Field(1.0, ge=1, description="above 1 makes tokens that have occurred less likely")
    temperature: float = Field(1.0, gt=0, description="sampling: below 1 favours likely tokens")
    top_k: int = Field(0, ge=0, description="sampling: only the k most likely tokens; 0: all")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sampling: only the most likely tokens whose probabilities add up to this"
    )
    stop_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="token ids that end an output as EOS does, in imported models"
    )
    suppress_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="token ids that are never generated, in imported models"
    )
    begin_suppress_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="token ids that are not generated first, after what an output must begin with"
    )
    ctc_weight: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="speech: weight of CTC when CTC and decoder rank texts together; not set: model.ctc_weight",
    )
    batch_tokens: int = Field(
        4096, ge=1, description="source tokens per batch; affects speed and memory, not the results"
    )


class AugmentSettings(SettingsModel):
    """The random changes of training images, drawn again in every epoch."""

    shift: int = Field(0, ge=0, description="move images by up to this many pixels in both directions")
    flip: bool = Field(False, description="mirror every other image, left to right")
    operations: int = Field(
        0, ge=0, le=8, description="RandAugment: operations on each image, such as a rotation or a change of contrast"
    )
    magnitude: float = Field(1.0, ge=0, le=1, description="RandAugment: maximum strength of an operation")
    erase: float = Field(0.0, ge=0, le=1, description="probability that a random rectangle of an image is erased")
    mixup: float = Field(
        0.0, ge=0, description="mixup: mean of two images and of their labels, weighted by Beta(mixup, mixup); 0: off"
    )
    cutmix: float = Field(
        0.0, ge=0, description="CutMix: paste a rectangle of another image; with mixup, one of both; 0: off"
    )


class Recipe(SettingsModel):
    """A recipe: all settings of a run."""

    model_config = ConfigDict(defer_build=True)  # until first use, when all model families are registered

    about: str = Field("", description="what the recipe is for")
    task: Annotated[str, NameIn(TASKS)] = Field(
        "", validate_default=False, description="task; not set: by model family and data"
    )
    data: DataSettings
    text: TextSettings = Field(default_factory=lambda: TextSettings())
    model: ModelSettings = Field(default_factory=lambda: families()["transformer"].model_validate({}))
    training: TrainingSettings = Field(default_factory=lambda: TrainingSettings())
    augment: AugmentSettings = Field(default_factory=lambda: AugmentSettings())
    decoding: DecodingSettings = Field(default_factory=lambda: DecodingSettings())

    @model_validator(mode="after")
    def _check_r_drop(self) -> Recipe:
        if self.training.r_drop and not self.model.dropout:
            raise ValueError("training.r_drop compares two passes that differ in dropout: model.dropout must not be 0")
        return self

    @model_validator(mode="after")
    def _check_guided_alignment(self) -> Recipe:
        if self.training.guided_alignment is not None:
            if self.model.guided_head is None:
                raise ValueError('training.guided_alignment needs model.family = "transformer"')
            score = getattr(self.model, "cross_score", None) or getattr(self.model, "score", "scaled-dot")
            if score not in ("dot", "scaled-dot"):
                raise ValueError(f'training.guided_alignment needs the score dot or scaled-dot, not "{score}"')
        return self

    @model_validator(mode="after")
    def _check_task(self) -> Recipe:
        if not self.task:
            tasks = [name for name in self.model.tasks if TASKS[name].data == self.data.kind] or self.model.tasks[:1]
            if len(tasks) > 1:
                raise ValueError(f"task is missing: it can be {' or '.join(tasks)}")
            object.__setattr__(self, "task", tasks[0])
        TASKS[self.task].check(self)
        return self

    @model_validator(mode="after")
    def _refuse_unused(self) -> Recipe:
        """Refuse settings that have no effect for the task, unless they have their defaults."""
        for name in OPTIONAL_SECTIONS:
            if not self.has_section(name) and getattr(self, name) != type(getattr(self, name))():
                raise ValueError(f'[{name}] has no effect for task = "{self.task}": leave it out')
        for name in self.data.unused:
            if getattr(self.data, name) != DataSettings.model_fields[name].default:
                others = "texts" if name in TEXT_SETTINGS else "captions" if name in CAPTION_SETTINGS else "images"
                what = "speech" if name in SPEECH_SETTINGS else others
                raise ValueError(f'data.{name} is for {what} and has no effect for task = "{self.task}": leave it out')
        return self

    def has_section(self, name: str) -> bool:
        """Whether the settings of a section have an effect for the task."""
        return name not in OPTIONAL_SECTIONS or name in TASKS[self.task].sections
