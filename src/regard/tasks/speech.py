"""Speech recognition and translation: from a recording to its text, in its own language or in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.audio import Samples, check_samples, cut_at_pauses, read_audio
from regard.data.corpora import expand, no_data
from regard.data.features import Example
from regard.data.log_mel import HOP, WINDOW, log_mel, whisper_log_mel
from regard.data.speech import Recording, Utterance, at_speeds, join_utterances, read_utterances
from regard.errors import UserError
from regard.metrics.error_rates import ErrorRates
from regard.metrics.text_scores import score_texts
from regard.models.speech import SpeechSettings
from regard.nn.sound import subsampled
from regard.recipes.schema import Corpus, Recipe
from regard.registry import CORPORA, TASKS
from regard.run_dir import RunDir
from regard.tasks.axes import Hidden, Inspection, frame_axis, refuse_edges, to_shares
from regard.tasks.base import TraceSpec
from regard.tasks.feature_text import FeatureDataset, Features, FeatureTextTask
from regard.tasks.speech_prompt import Prompt
from regard.tasks.transcriber import Transcriber
from regard.tasks.translator import Answer
from regard.text import Tokenizer, encode_side

SPLITS = {"train": 0, "valid": 1, "test": 2}  # seeds of joined recordings


@TASKS.register("speech")
class SpeechTask(FeatureTextTask):
    """Trains on recordings and their texts; the loss counts every token of a text."""

    name = "speech"
    about = "from a recording to its text"
    data = "speech"
    verb = "transcribe"
    usage = "recording.wav"
    builtin_usage = "'test 1'"
    rows = "frames"
    verbs = frozenset({"transcribe", "evaluate", "look", "draw", "bench", "export"})
    writer_class = Transcriber
    prompt_settings = ("language", "task")

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.trace = TraceSpec("write" if self.settings.ctc_weight < 1 else "spell")

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        model, data = recipe.model, recipe.data
        if isinstance(model, SpeechSettings) and model.ctc_weight and recipe.training.r_drop:
            raise ValueError("training.r_drop needs model.ctc_weight = 0: it compares the outputs of a decoder")
        if isinstance(model, SpeechSettings) and model.prompt != "whisper":
            for name in ("language", "speech_task"):
                if getattr(data, name) != type(data).model_fields[name].default:
                    raise ValueError(f'data.{name} needs model.prompt = "whisper"')
        if data.join is not None and (data.speech is None or data.join[0] > data.join[1]):
            raise ValueError("data.join is for the recordings of data.speech: the fewest, then the most to be joined")
        for name in ("test_speakers", "speeds"):
            if getattr(data, name) and data.speech is None:
                raise ValueError(f"data.{name} is for the recordings of data.speech")

    @property
    def settings(self) -> SpeechSettings:
        assert isinstance(self.recipe.model, SpeechSettings)
        return self.recipe.model

    @property
    def members(self) -> str:
        return "recordings"

    def same_outputs(self, other: Recipe) -> bool:
        """Whether texts are not another column of the same manifest. Columns of other manifests are not comparable."""
        ours, theirs = self.recipe.data, other.data
        return ours.columns == theirs.columns or ours.speech != theirs.speech

    # -- data ---------------------------------------------------------------------------------------------------------

    def check_files(self, resumed: bool) -> list[str]:
        if self.recipe.data.speech is not None:
            expand(self.recipe.data.speech, self.recipe.data.folder)
        return []

    @cached_property
    def utterances(self) -> list[Utterance]:
        """All recordings of the manifests."""
        return read_utterances(self.recipe.data)

    def training_examples(self, corpus: Corpus) -> list[Example]:
        if corpus.corpus is not None:
            return [(u.recording, u.text) for u in CORPORA[corpus.corpus].utterances("train", corpus.count)]
        return self._split("train")[: corpus.count]

    def held_out_examples(self, split: str) -> list[Example]:
        if self.recipe.data.corpus is not None:
            return [(u.recording, u.text) for u in CORPORA[self.recipe.data.corpus].utterances(split)]
        return self._split(split)

    def _split(self, split: str) -> list[Example]:
        """The examples of a split of the manifests, joined if the recipe says so."""
        data = self.recipe.data
        if data.speech is None:
            raise no_data(data)
        chosen = [utterance for utterance in self.utterances if utterance.split == split]
        if not chosen:
            raise UserError(f"there are no {split} recordings: give the manifest a column split, or set data.held_out")
        if split == "train":
            chosen = at_speeds(chosen, data.speeds)
        if data.join is not None:
            count = data.count if split == "train" and data.count is not None else len(chosen)
            chosen = join_utterances(chosen, data.join, count, 3 * data.split_seed + SPLITS[split])
        return [(utterance.recording, utterance.text) for utterance in chosen]

    def read_input(self, argument: str) -> Samples:
        return read_audio(argument, self.settings.sample_rate)

    def input_list(self, given: Any) -> tuple[list[Any], bool]:
        """The recordings that an argument of `Model.transcribe` stands for, and whether it is a single one."""
        single = isinstance(given, str | Path) or getattr(given, "ndim", 2) == 1
        sounds = [given] if single else list(given)
        return [
            self.read_input(str(s)) if isinstance(s, str | Path) else check_samples(np.asarray(s), "transcribe")
            for s in sounds
        ], single

    def stored_features(self, given: Any) -> Features:
        rate, longest = self.settings.sample_rate, self.longest
        samples = self._samples(given)
        if len(samples) > longest * rate:
            name = given.name if isinstance(given, Recording) else "the recording"
            seconds = f"{len(samples) / rate:.1f} seconds long"
            raise UserError(f"{name} is {seconds}, and the model reads at most {longest:g}: cut it into parts")
        return self._log_mel(samples)

    def stored_parts(self, given: Any) -> list[Features]:
        """A recording that is longer than the model's window is cut at pauses."""
        samples = self._samples(given)
        if not self.has_window or len(samples) <= self.longest * self.settings.sample_rate:
            return [self.stored_features(given)]
        return [self._log_mel(part) for part in cut_at_pauses(samples, self.settings.sample_rate, self.longest)]

    @property
    def has_window(self) -> bool:
        """Whether the model reads so many seconds at once, however long a recording is."""
        return self.settings.features == "whisper"

    @property
    def longest(self) -> float:
        """The most seconds that the model reads at once."""
        settings = self.settings
        return settings.window if self.has_window else settings.max_positions * settings.subsample * HOP

    def _samples(self, given: Any) -> Samples:
        samples: Samples = given.samples(self.settings.sample_rate) if isinstance(given, Recording) else given
        return samples

    def _log_mel(self, samples: Samples) -> Features:
        settings = self.settings
        if self.has_window:
            features = whisper_log_mel(samples, settings.sample_rate, settings.mels, settings.window)
        else:
            features = log_mel(samples, settings.sample_rate, settings.mels)
        found: Features = features.numpy()
        return found

    def encode_texts(self, run: RunDir, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        if self.settings.prompt == "none":
            return super().encode_texts(run, texts)
        recipe, tokenizer = self.recipe, run.tokenizers[1]
        prompt = Prompt(self.settings.prompt, tokenizer, recipe.data.language, recipe.data.speech_task)
        return encode_side(
            tokenizer,
            [f" {text}" for text in texts],  # as the model was trained
            tag=None,
            max_len=recipe.model.max_positions,
            lowercase=recipe.data.lowercase,
            prefix=prompt.ids(),
        )

    def language_of(self, tokenizer: Tokenizer, answer: Answer) -> str | None:
        """The code of the language of an answer's prompt."""
        tokens = answer.hypotheses[0].tokens if answer.hypotheses else ()
        return Prompt(self.settings.prompt, tokenizer).language_of(tokens)

    def inspect(self, given: Any) -> Inspection:
        features, settings = self.features(given), self.settings
        frames = subsampled(len(features), settings.subsample)
        # Frame i of the encoder is centred at frame i * subsample of the features, which Whisper centres on its time.
        offset = 0.0 if self.has_window else WINDOW / 2
        inner = ((np.arange(1, frames) - 0.5) * settings.subsample) * HOP + offset
        seconds = settings.window if self.has_window else (len(features) - 1) * HOP + WINDOW
        times = np.concatenate([[0.0], inner.clip(max=seconds), [seconds]])
        return Inspection(features, frame_axis(features, times, seconds, settings.sample_rate / 2000))

    def hide(self, inspection: Inspection, hidden: Hidden) -> Inspection:
        """Make all features of some frames their mean over the recording: 0 for standard ones, as in SpecAugment."""
        refuse_edges(hidden, "frames")
        axis, factor = inspection.axis, self.settings.subsample
        number = (np.arange(len(inspection.content)) + factor // 2) // factor  # of the encoder's frame
        gone = np.isin(number.clip(max=len(axis) - 1), hidden.elements)
        mean = inspection.content.mean() if self.has_window else 0  # that of standard features
        features = np.where(gone[:, None], np.float32(mean), inspection.content)
        return Inspection(features, replace(axis, arrays={"spectrogram": to_shares(features)}))

    def show_input(self, index: int, given: Any) -> str:
        return given.name if isinstance(given, Recording) else f"recording {index + 1}"

    def dataset(
        self,
        run: RunDir,
        progress: Callable[[str, int], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> FeatureDataset:
        dataset = super().dataset(run, progress, say)
        if self.settings.ctc_weight and say is not None:
            short = sum(self._too_short(store.source[i], store.target[i]) for store in dataset.stores
                        for i in range(len(store)))  # fmt: skip
            if short:
                say(
                    f"warning: {short:,} recordings have fewer frames than CTC needs for their texts, and teach it "
                    "nothing: lower model.subsample, or choose longer tokens"
                )
        return dataset

    def _too_short(self, features: Features, target: Any) -> bool:
        """CTC needs a frame for each token, and one more between two equal ones."""
        tokens = target[:-1].tolist()
        needed = len(tokens) + sum(a == b for a, b in pairwise(tokens))
        return subsampled(len(features), self.settings.subsample) < needed

    # -- measuring ----------------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        rates, scores = ErrorRates.of(outputs, references), score_texts(outputs, references)
        return {"wer": rates.wer, "cer": rates.cer, "exact": rates.accuracy, "bleu": scores.bleu, "chrf": scores.chrf}
