"""Translation of large collections of files, on one machine or a cluster.

`BatchTranslator` is a callable for the batches of other engines: Ray Data, Spark, `datasets`. It is small to send to
workers, and loads the model once in each process.

    translate = BatchTranslator("runs/en-es", beam=1)
    translate(["this cat is very large"])                             # a list of translations
    dataset.map(translate, batched=True)                              # datasets: a column "translation"
    ray.data.read_json("in").map_batches(BatchTranslator, fn_constructor_args=["runs/en-es"], concurrency=4)

`translate_shards` is what `regard translate --engine ray` runs: Ray Data distributes files, each worker translates a
whole file and writes it once, under its final name only when it is complete. So a second start continues with the files
that are missing, and a worker that dies has written nothing.
"""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import tensor_io
from regard.api import load
from regard.data.lines import COMPRESSED, open_compressed, read_lines
from regard.errors import UserError, first_line
from regard.files import DirectoryLock, atomic_write, parse_json, remove_temporary_files, write_text
from regard.run_dir import RunDir

if TYPE_CHECKING:
    from regard.api import Model

BLOCK_LINES = 2048  # translated at once: enough to sort them by length
JOB_FILE = "translation.json"  # in the output folder: what the translations depend on
Translate = Callable[[list[str]], list[str]]


class BatchTranslator:
    """Translates lists of texts, or batches of columns, with the model of a run.

    `settings` are those of `Model.translate`: `beam`, `length_penalty`, `source_tag`, ... The model is loaded at the
    first call, in the process that makes it; a pickled translator holds only names and numbers.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        column: str = "text",
        output: str = "translation",
        weights: str = "best",
        device: str = "auto",
        precision: str = "auto",
        **settings: Any,
    ) -> None:
        self.run, self.column, self.output = str(run), column, output
        self.loading = {"weights": weights, "device": device, "precision": precision}
        self.settings = settings
        self._model: Model | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = load(self.run, **self.loading)
        return self._model

    def __call__(self, batch: Any) -> Any:
        """A list of texts -> a list of translations; a mapping of columns -> the same with a column `output`."""
        if not isinstance(batch, Mapping):
            return self._translate(list(batch))
        if self.column not in batch:
            columns = ", ".join(map(str, batch))
            raise UserError(f"a batch without a column {self.column!r}: it has {columns}")
        return {**batch, self.output: self._translate([str(text) for text in batch[self.column]])}

    def _translate(self, texts: list[str]) -> list[str]:
        return [found.text for found in self.model.translate(texts, **self.settings)] if texts else []


@dataclass(frozen=True)
class Shard:
    """A file of lines or of JSON objects, and the file that its translations go to."""

    source: Path
    target: Path

    @property
    def is_json(self) -> bool:
        name = self.source.name.lower()
        return name.removesuffix(next((end for end in COMPRESSED if name.endswith(end)), "")).endswith(".jsonl")

    def translate(self, translate: Translate, column: str, output: str) -> int:
        """Translate the file and write the result, whole or not at all; return the number of lines.

        A blank line stays blank. A JSON object gets a field `output` with the translation of its field `column`.
        """
        lines = 0
        with atomic_write(self.target) as temporary:
            with open_compressed(temporary, "wb", self.target.suffix) as file:
                for block in self._blocks():
                    written = self._translated(block, lines, translate, column, output)
                    file.write("".join(line + "\n" for line in written).encode())
                    lines += len(block)
            count = sum(1 for _ in read_lines_of(temporary, self.target.suffix))
            if count != lines:
                raise UserError(f"{self.target}: {count:,} lines were written for {lines:,} lines of {self.source}")
        return lines

    def _blocks(self) -> Iterator[list[str]]:
        lines = read_lines(self.source)
        while block := list(islice(lines, BLOCK_LINES)):
            yield block

    def _translated(self, block: list[str], before: int, translate: Translate, column: str, output: str) -> list[str]:
        if not self.is_json:
            return translate(block)
        records = [self._record(line, before + n, column) for n, line in enumerate(block, 1)]
        texts = [str(record[column]) if record is not None else "" for record in records]
        pairs = zip(records, translate(texts), strict=True)
        return [
            "" if record is None else json.dumps({**record, output: text}, ensure_ascii=False) for record, text in pairs
        ]

    def _record(self, line: str, number: int, column: str) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            record = parse_json(line)
        except ValueError as error:
            raise UserError(f"{self.source}, line {number}: not valid JSON: {first_line(error)}") from error
        if not isinstance(record, dict) or not isinstance(record.get(column), str):
            raise UserError(f"{self.source}, line {number}: no text in a field {column!r} (--column names another)")
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UserError(f"{self.source}, line {number}: half of a surrogate pair, which is no character") from None
        return record


def read_lines_of(path: Path, suffix: str) -> Iterator[bytes]:
    """The lines of a file, whose compression follows from its last suffix."""
    with open_compressed(path, "rb", suffix) as file:
        yield from file


def find_shards(pattern: str, folder: Path) -> list[Shard]:
    """The files that a pattern matches, sorted, each with a file of the same name in the folder."""
    paths = [Path(name) for name in sorted(glob.glob(os.path.expanduser(pattern), recursive=True))]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise UserError(f"no file matches {pattern}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: --engine ray writes a file for each input into a folder")
    shards = [Shard(path.resolve(), folder.resolve() / path.name) for path in paths]
    names: dict[str, Path] = {}
    for shard in shards:
        if (other := names.setdefault(shard.target.name, shard.source)) != shard.source:
            raise UserError(f"{other} and {shard.source} have the same name, and would be written to the same file")
        if shard.source == shard.target:
            raise UserError(f"{shard.source} would be overwritten: choose another folder for the output")
    return shards


def translation_settings(translator: BatchTranslator) -> dict[str, Any]:
    """The model, with a checksum of its weights, and the settings that translations depend on."""
    loading = {key: value for key, value in translator.loading.items() if key != "device"}
    files = RunDir(translator.run).checkpoint(translator.loading["weights"]).files
    return {
        "run": str(Path(translator.run).resolve()),
        **loading,
        "checksum of the weights": [tensor_io.file_digest(file) for file in files],
        **translator.settings,
        "column": translator.column,
        "output": translator.output,
    }


def claim_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write down what the translations in a folder depend on; refuse a folder with translations of another kind."""
    job = folder / JOB_FILE
    current = json.loads(json.dumps(settings, default=str))
    if job.exists():
        try:
            before = parse_json(job.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {job}: {first_line(error)}") from error
        if not isinstance(before, dict):
            raise UserError(f"{job} is damaged: it is not a JSON object")
        missing = object()
        changed = [key for key in {**before, **current} if before.get(key, missing) != current.get(key, missing)]
        if changed:
            raise UserError(f"{folder} holds translations with another {', '.join(changed)}: choose another --output")
        return
    write_text(job, json.dumps(current, indent=2) + "\n")


def translate_folder(
    translator: BatchTranslator,
    pattern: str,
    folder: Path,
    *,
    workers: int = 1,
    gpus: float = 0.0,
    progress: Callable[[int], None] = lambda files: None,
) -> tuple[int, int]:
    """Translate the files that a pattern matches into a folder, as `translate_shards`; return all files, and new lines.

    The folder keeps what its translations depend on, and is locked.
    """
    shards = find_shards(pattern, folder)
    settings = translation_settings(translator)
    with DirectoryLock(folder, "translating"):
        claim_folder(folder, settings)
        remove_temporary_files(folder)  # left by workers that died
        how = {"column": translator.column, "output": translator.output, "workers": workers, "gpus": gpus}
        try:
            lines = translate_shards(translator, shards, progress=progress, **how)  # type: ignore[arg-type]
        finally:
            remove_temporary_files(folder)
    return len(shards), lines


class ShardWorker:
    """A Ray worker, which keeps a translator and translates one file after the other."""

    def __init__(self, translate: Translate, column: str, output: str) -> None:
        self.translate, self.column, self.output = translate, column, output

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard = Shard(Path(row["source"]), Path(row["target"]))
        try:
            lines = shard.translate(self.translate, self.column, self.output)
        except UserError as error:  # the input is at fault: another try would fail too
            return {"source": row["source"], "lines": 0, "error": str(error)}
        except (OSError, EOFError, ValueError) as error:  # should not stop the other files
            return {"source": row["source"], "lines": 0, "error": f"{row['source']}: {first_line(error)}"}
        return {"source": row["source"], "lines": lines, "error": ""}


def translate_shards(
    translate: Translate,
    shards: Sequence[Shard],
    *,
    column: str = "text",
    output: str = "translation",
    workers: int = 1,
    gpus: float = 0.0,
    progress: Callable[[int], None] = lambda files: None,
) -> int:
    """Translate the shards whose target does not exist, with Ray Data; return the number of lines translated.

    `workers` processes take one file after the other; `gpus` is what each needs. A worker that dies is replaced, and
    its file begun again. Runs on the cluster that Ray is connected to, or that RAY_ADDRESS names, else on this machine.
    """
    missing = [shard for shard in shards if not shard.target.exists()]
    progress(len(shards) - len(missing))
    if not missing:
        return 0
    ray = _ray(workers)
    rows = [{"source": str(shard.source), "target": str(shard.target)} for shard in missing]
    found = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        ShardWorker,
        fn_constructor_args=(translate, column, output),
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows))),
        num_cpus=1,
        num_gpus=gpus or None,
    )
    lines, errors = 0, []
    try:
        for row in found.iter_rows():
            lines += int(row["lines"])
            errors += [row["error"]] if row["error"] else []
            progress(1)
    except ray.exceptions.RayError as error:
        raise UserError(f"Ray stopped: {_cause(error)}; the same command continues") from error
    if errors:
        more = f" (and {len(errors) - 1} more files)" if len(errors) > 1 else ""
        raise UserError(f"{errors[0]}{more}; the other files are done")
    lost = [shard.target for shard in missing if not shard.target.exists()]
    if lost:
        raise UserError(f"{lost[0]} is not there, although a worker wrote it: workers need a common file system")
    return lines


def _cause(error: BaseException) -> str:
    """The last line of what Ray says, which names the error of a worker."""
    return str(error).strip().splitlines()[-1].strip() or type(error).__name__


def _ray(workers: int) -> Any:
    """Ray, connected to a cluster or started on this machine, without its lines about itself."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors that concern a job are raised
    try:
        import ray
        import ray.data
    except ImportError:
        raise UserError("--engine ray needs Ray: pip install 'regard[ray]'") from None
    if not ray.is_initialized():
        local: dict[str, Any] = (
            {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(workers, 1) + 1, "include_dashboard": False}
        )
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray
