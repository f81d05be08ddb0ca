"""Recordings and their texts: from manifests and archives, joined into longer ones, or built in.

A manifest is a TSV file whose first line names its columns: file (relative to the manifest), text, and optionally split
(train, valid or test) and speaker. A .tar archive, also compressed, holds the sound files and one manifest.
"""

from __future__ import annotations

import tarfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np

from regard.data.audio import Samples, check_samples, decode_audio, resample
from regard.data.corpora import expand
from regard.data.lines import read_lines
from regard.data.stream import generator
from regard.errors import UserError, first_line
from regard.files import errno_text
from regard.recipes.schema import MANIFESTS, DataSettings

SPLITS = ("train", "valid", "test")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
MAX_MEMBER_BYTES = 1 << 28  # of a file in an archive
PAUSE = 0.1  # longest pause between joined recordings, in seconds


@dataclass(frozen=True)
class Recording:
    """A sound that is read when it is needed: its samples, the bytes of a sound file, or the path of one.

    `followed_by` are recordings that follow it, each after a pause in seconds. `name` is for messages.
    """

    name: str
    sound: Samples | bytes | Path
    rate: int = 0  # of samples; files have their own
    speed: float = 1.0  # at which it is played, which changes the pitch too
    followed_by: tuple[tuple[float, Recording], ...] = ()

    def samples(self, rate: int) -> Samples:
        """[n] samples at this rate."""
        parts = [self._samples(rate)]
        for pause, recording in self.followed_by:
            parts += [np.zeros(round(pause * rate), np.float32), recording.samples(rate)]
        return np.concatenate(parts)

    def _samples(self, rate: int) -> Samples:
        if isinstance(self.sound, np.ndarray):
            return resample(self.sound, round(self.rate * self.speed), rate)
        if isinstance(self.sound, Path):
            try:
                content = self.sound.read_bytes()
            except OSError as error:
                raise UserError(f"cannot read {self.sound}: {errno_text(error)}") from error
        else:
            content = self.sound
        samples, actual = decode_audio(content, self.name)
        return resample(check_samples(samples, self.name), round(actual * self.speed), rate)


@dataclass(frozen=True)
class Utterance:
    """A recording, what is said in it, and by whom."""

    recording: Recording
    text: str
    split: str = ""
    speaker: str = ""


def read_utterances(data: DataSettings) -> list[Utterance]:
    """The utterances of the manifests and archives of a recipe, each with its split."""
    file, text = (str(column) for column in data.columns or MANIFESTS["speech"])
    found = [
        utterance
        for path in expand(data.speech or [], data.folder)
        for utterance in (_archive if path.name.endswith(ARCHIVES) else _manifest)(path, file, text)
    ]
    if data.test_speakers:
        found = [_by_speaker(utterance, data.test_speakers) for utterance in found]
        if missing := set(data.test_speakers) - {utterance.speaker for utterance in found}:
            speakers = ", ".join(sorted({utterance.speaker for utterance in found}))
            raise UserError(f"data.test_speakers: there is no speaker {min(missing)!r}; there are {speakers}")
    return _held_out(found, data.held_out, data.split_seed)


def _by_speaker(utterance: Utterance, speakers: Sequence[str]) -> Utterance:
    """All of these speakers' utterances are the test set, and those of others that were to test are trained on."""
    kept = "train" if utterance.split == "test" else utterance.split
    return replace(utterance, split="test" if utterance.speaker in speakers else kept)


def _held_out(utterances: list[Utterance], share: float, seed: int) -> list[Utterance]:
    """Hold out a random share of the training utterances for each held-out split of which there are none."""
    marked = [replace(utterance, split=utterance.split or "train") for utterance in utterances]
    present = {utterance.split for utterance in marked}
    training = [number for number, utterance in enumerate(marked) if utterance.split == "train"]
    order = generator(seed).permutation(training).tolist()
    count = round(share * len(training))
    for split in ("valid", "test"):
        if split not in present:
            for number in order[:count]:
                marked[number] = replace(marked[number], split=split)
            order = order[count:]
    return marked


def at_speeds(utterances: Sequence[Utterance], speeds: Sequence[float]) -> list[Utterance]:
    """Copies of utterances at each speed (Ko et al. 2015), each speed as another speaker; none given: the originals."""
    if not speeds:
        return list(utterances)
    return [
        replace(u, recording=replace(u.recording, speed=speed), speaker=f"{u.speaker} at {speed:g}")
        for speed in speeds
        for u in utterances
    ]


def join_utterances(utterances: Sequence[Utterance], sizes: Sequence[int], count: int, seed: int) -> list[Utterance]:
    """Make `count` utterances of `sizes[0]` to `sizes[1]` drawn ones of the same speaker, with short pauses between.

    The n-th is a function of the seed and n.
    """
    by_speaker: dict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        by_speaker[utterance.speaker].append(utterance)
    speakers = sorted(by_speaker)
    joined = []
    for number in range(count):
        random = generator(seed, number)
        choices = by_speaker[speakers[random.integers(len(speakers))]]
        drawn = [choices[i] for i in random.integers(len(choices), size=random.integers(sizes[0], sizes[1] + 1))]
        pauses = random.uniform(0, PAUSE, len(drawn) - 1).tolist()
        first, *others = (utterance.recording for utterance in drawn)
        recording = replace(first, name=f"{first.name} and others", followed_by=tuple(zip(pauses, others, strict=True)))
        text = " ".join(utterance.text for utterance in drawn)
        joined.append(replace(drawn[0], recording=recording, text=text))
    return joined


def _manifest(path: Path, file: str, text: str) -> list[Utterance]:
    def sound(name: str) -> Path:
        found = path.parent / name
        if not found.is_file():
            raise UserError(f"no such file: {found}")
        return found

    return _utterances(list(read_lines(path)), str(path), file, text, sound)


@lru_cache(maxsize=4)
def _members(path: Path, size: int, time: int) -> dict[str, bytes]:
    """The files of an archive, by name. Nothing is written to disk."""
    try:
        with tarfile.open(path) as archive:
            contents = {}
            for member in archive:
                if member.isfile() and member.size > MAX_MEMBER_BYTES:
                    raise UserError(f"{path}: {member.name} is larger than {MAX_MEMBER_BYTES >> 20} MB")
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    contents[member.name] = file.read()
            return contents
    except OSError as error:
        raise UserError(f"cannot read {path}: {errno_text(error)}") from error
    except Exception as error:  # tarfile and the decompressors raise many kinds for damaged files
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not an archive that can be read: {first_line(error)}") from error


def _archive(path: Path, file: str, text: str) -> list[Utterance]:
    state = path.stat()
    members = _members(path, state.st_size, state.st_mtime_ns)
    manifests = [name for name in members if name.endswith(".tsv")]
    if len(manifests) != 1:
        raise UserError(f"{path} holds {len(manifests)} .tsv files, and must hold one: the manifest")
    folder = PurePosixPath(manifests[0]).parent

    def sound(name: str) -> bytes:
        if (member := str(folder / name)) not in members:
            raise UserError(f"{path} has no file {member}, which its manifest names")
        return members[member]

    try:
        lines = members[manifests[0]].decode().splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path}: {manifests[0]} is not text in UTF-8") from None
    return _utterances(lines, f"{path}, {manifests[0]}", file, text, sound)


def _utterances(
    lines: Sequence[str], where: str, file: str, text: str, sound: Callable[[str], Path | bytes]
) -> list[Utterance]:
    """The utterances of the lines of a manifest, with these names of its columns; `sound` finds a file."""
    names = lines[0].split("\t") if lines else []
    if missing := [name for name in (file, text) if name not in names]:
        raise UserError(f"{where}: the first line must name the columns {file} and {text}, and {missing[0]} is missing")
    utterances = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(names):
            raise UserError(f"{where}, line {number}: {len(cells)} cells, and the first line names {len(names)}")
        row = dict(zip(names, cells, strict=True))
        split, transcript = row.get("split", ""), " ".join(row[text].split())
        if split and split not in SPLITS:
            raise UserError(f"{where}, line {number}: the split is {split!r}, and must be train, valid or test")
        if not transcript:
            raise UserError(f"{where}, line {number}: the {text} is empty")
        try:
            recording = Recording(row[file], sound(row[file]))
        except UserError as error:
            raise UserError(f"{where}, line {number}: {error}") from error
        utterances.append(Utterance(recording, transcript, split, row.get("speaker", "")))
    if not utterances:
        raise UserError(f"{where}: no recordings")
    return utterances
