"""Corrupted recipes, run directories, models to import and corpora: each must be refused soon, in one line, or work."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign import odd
from tests.campaign.sandbox import Clock, Outcome, Tally, call, regard

RUNS = {
    "transformer": ("translate", "this cat"),
    "recurrent (additive)": ("translate", "this cat"),
    "gpt": ("generate", "Once upon"),
    "bert (fill)": ("fill", "a [MASK] day"),
}
IMPORTS = {"gpt": "gpt", "bert (fill)": "bert", "transformer": "marian"}
# Settings that only ask for more work: 10^12 steps are valid.
WORK = {"steps", "accumulate", "count", "sample", "validate_lines", "max_extra", "max_ratio", "min_length", "pool"}


def run(count: int | None, seed: int, seconds: float | None, scratch: Path) -> Tally:
    tally, random = Tally("hostile"), Random(seed)
    made = call(partial(_make, scratch), scratch, seconds=600)
    assert made.status == 0, made.err
    kinds: list[Callable[[Path, Random], tuple[str, list[Outcome], str]]] = [
        _recipe,
        _run,
        _weights,
        _import,
        _file,
        _data,
    ]
    for number in Clock(count, seconds).numbers():
        kind = kinds[number % len(kinds)]
        home = scratch / f"case {number}"
        home.mkdir()
        what, outcomes, done = kind(home, random)
        faults = [outcome.fault() or outcome.cost() for outcome in outcomes]
        tally.add(what, next((f"seed {seed}, case {number} ({done}): {fault}" for fault in faults if fault), ""))
        shutil.rmtree(home, ignore_errors=True)
    return tally


def _make(scratch: Path) -> int:
    """Make tiny runs, and export them."""
    from regard.errors import UserError
    from regard.interop.huggingface import export_run
    from tiny_runs import FAMILIES, make, make_run

    marian = {"positions": "sinusoidal-split", "norm_first": False, "activation": "relu", "output_bias": True}
    for family in RUNS:
        about = FAMILIES[family]
        data = {"corpus": about["data"], "count": 50}  # training reads all of it before the weights
        text = {"unit": "bpe", "vocabulary": 400}
        made = make(scratch / "runs" / family, {"data": data, "text": text, "model": about["model"]})
        if family in IMPORTS:
            try:
                source = make_run(scratch / "marian", family, **marian) if family == "transformer" else made
                export_run(source, scratch / "imports" / family)
            except UserError as error:
                print(f"{family} is not exported: {error}")
    return 0


def _use(run: Path, family: str, random: Random) -> list[Outcome]:
    """Run commands that read a run."""
    verb, text = RUNS[family]
    more = random.choice(
        [("evaluate", run), ("draw", run, text), ("recipes", run / "recipe.toml"), ("draw", run, "--what", "curves")]
    )
    return [regard([verb, run, text], run.parent), regard(more, run.parent)]


def _copied(home: Path, kind: str, family: str) -> Path:
    return Path(shutil.copytree(home.parent / kind / family, home / "corrupted"))


def _recipe(home: Path, random: Random) -> tuple[str, list[Outcome], str]:
    """Train a changed recipe."""
    import tomllib

    family = random.choice(list(RUNS))
    text = (home.parent / "runs" / family / "recipe.toml").read_text()
    file = home / "mine.toml"
    if random.random() < 0.3:
        content, done = odd.bytes_of(text.encode(), random)
        file.write_bytes(content)
    elif random.random() < 0.1:
        file.write_text(text + "\n[" + odd.deep(random.choice(["a.", "[", "{a=", '"'])))
        done = "nested deeply"
    else:
        changed, done = odd.mutated(tomllib.loads(text), random, random.choice([1, 1, 2]))
        if any(f".{name} = " in done for name in WORK):
            changed, done = tomllib.loads(text), "nothing"
        file.write_text(_toml(changed), encoding="utf-8")
    words = [
        "train",
        file,
        "--out",
        home / "run",
        "--device",
        "cpu",
        "--set",
        "training.steps=1",
        "--set",
        "data.count=50",
    ]
    words += ["--set", "training.validate_lines=1"]
    return "a recipe", [regard(["recipes", file], home), regard(words, home)], f"{family}: {done}"


def _toml(table: Any) -> str:
    """Write TOML; values that TOML cannot express become others."""
    from regard.recipes.to_toml import toml_value

    if not isinstance(table, dict):
        return f"value = {toml_value(table)}"
    lines = [f"{json.dumps(key)} = {toml_value(value)}" for key, value in table.items()]
    return "\n".join(lines).replace("None", '""') + "\n"


def _run(home: Path, random: Random) -> tuple[str, list[Outcome], str]:
    """Change the JSON or TOML of a run directory."""
    import tomllib

    family = random.choice(list(RUNS))
    run = _copied(home, "runs", family)
    name = random.choice(["run.json", "tokenizer.json", "recipe.toml", "recipe.toml"])
    file = run / name
    if random.random() < 0.25:
        content, done = odd.bytes_of(file.read_bytes(), random)
        file.write_bytes(content)
    elif random.random() < 0.1:
        file.write_text(odd.deep(random.choice(["[", '{"a":'])))
        done = "nested deeply"
    elif name == "recipe.toml":
        changed, done = odd.mutated(tomllib.loads(file.read_text()), random, random.choice([1, 1, 2]))
        file.write_text(_toml(changed), encoding="utf-8")
    else:
        changed, done = odd.mutated(json.loads(file.read_text()), random, random.choice([1, 1, 3]))
        file.write_text(json.dumps(changed))
        if random.random() < 0.7:
            _trust(run)
    return f"a run's {name}", _use(run, family, random), f"{family}: {done}"


def _trust(run: Path) -> None:
    """Renew the checksums of a run, as a deliberate manipulation would."""
    call(partial(_accept, run), run.parent)


def _accept(run: Path) -> int:
    from regard.run_dir import RunDir

    try:
        info = json.loads((run / "run.json").read_text())
        for file in run.glob("*tokenizer.json"):
            from regard.files import checksum  # type: ignore[attr-defined]

            info["tokenizers"][file.name] = checksum(file.read_bytes())
        from regard.run_dir import _write_info

        _write_info(run, info)
        RunDir(run).accept_edits()  # type: ignore[attr-defined]
    except Exception:
        return 1
    return 0


def _weights(home: Path, random: Random) -> tuple[str, list[Outcome], str]:
    """Change the tensors of a run or their header."""
    family = random.choice(list(RUNS))
    run = _copied(home, "runs", family)
    file = run / "model.safetensors"
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    action = random.choice(["header", "header", "facts", "bytes", "tensors", "tensors", "sparse", "length"])
    done = action
    if action == "bytes":
        content, done = odd.bytes_of(content, random)
        file.write_bytes(content)
    elif action == "length":
        claimed = random.choice([0, 1, size - 1, size + 1, 10**6, 10**12, 2**63, 2**64 - 1])
        file.write_bytes(struct.pack("<Q", claimed) + content[8:])
        done = f"header of {claimed} bytes"
    elif action in ("header", "facts", "sparse"):
        header = json.loads(content[8 : 8 + size])
        if action == "facts":
            about = json.loads(header["__metadata__"]["about"])
            changed, done = odd.mutated(about, random)
            header["__metadata__"]["about"] = odd.deep() if random.random() < 0.1 else json.dumps(changed)
        elif action == "header":
            header, done = odd.mutated(header, random, random.choice([1, 2]))
        else:
            name = next(name for name in header if name != "__metadata__")
            header[name] |= {"shape": [10**10], "data_offsets": [0, 4 * 10**10]}
            header = {"__metadata__": header["__metadata__"], name: header[name]}
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
        if action == "sparse":
            os.truncate(file, 8 + len(text) + 4 * 10**10)  # a sparse file: it takes no space on the disk
    else:
        seed = random.randrange(10**9)
        call(lambda: _other_tensors(file, Random(seed)), home)
    outcomes = _use(run, family, random)
    if random.random() < 0.2:
        shutil.copy(file, run / "resume.safetensors")
        train = ["train", run / "recipe.toml", "--out", run, "--device", "cpu", "--set", "training.steps=1"]
        outcomes.append(regard(train, home))
    return "a run's weights", outcomes, f"{family}: {done}"


def _other_tensors(file: Path, random: Random) -> int:
    """Write tensors with a correct checksum and wrong names, shapes, types or values."""
    import torch

    from regard import tensor_io

    tensors, facts = tensor_io.load(file)
    for _ in range(random.choice([1, 2, len(tensors)])):
        name = random.choice(list(tensors))
        tensor = tensors[name]
        changes: list[Any] = [
            torch.zeros(0), torch.tensor(1.0), tensor.flatten()[:1], tensor.to(torch.int64), tensor.to(torch.bool),
            tensor * float("nan"), tensor.to(torch.float64), tensor.unsqueeze(0),
            tensor.to(torch.bfloat16), tensor * 1e38, tensor.flatten(),
        ]  # fmt: skip
        choice = random.randrange(len(changes) + 2)
        if choice == len(changes):
            tensors["extra" * random.choice([1, 1000])] = tensor
        elif choice > len(changes):
            del tensors[name]
            if not tensors:
                break
        else:
            tensors[name] = changes[choice]
    tensor_io.save(file, tensors, odd.mutated(facts, random)[0] if random.random() < 0.3 else facts)
    return 0


def _import(home: Path, random: Random) -> tuple[str, list[Outcome], str]:
    """Import a changed Hugging Face folder."""
    family = random.choice([path.name for path in sorted((home.parent / "imports").iterdir())])
    folder = _copied(home, "imports", family)
    file = random.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    if random.random() < 0.5:
        file = folder / "config.json"
    if file.suffix == ".json" and random.random() < 0.8:
        changed, done = odd.mutated(json.loads(file.read_text()), random, random.choice([1, 1, 3]))
        file.write_text(odd.deep() if random.random() < 0.05 else json.dumps(changed))
    elif random.random() < 0.1:
        file.unlink()
        os.mkfifo(file)
        done = "a pipe"
    else:
        content, done = odd.bytes_of(file.read_bytes(), random)
        file.write_bytes(content)
    outcomes = [regard(["import", folder, "--out", home / "run"], home)]
    if outcomes[0].status == 0:
        outcomes += _use(home / "run", family, random)
    return f"an import ({IMPORTS[family]})", outcomes, f"{file.name}: {done}"


def _file(home: Path, random: Random) -> tuple[str, list[Outcome], str]:
    """Put something that is not a regular file in the place of a file of a run."""
    family = random.choice(list(RUNS))
    run = _copied(home, "runs", family)
    (run / "metrics.jsonl").write_text('{"step": 1, "kind": "valid", "loss": 1.0}\n')
    file = run / random.choice(["run.json", "recipe.toml", "tokenizer.json", "model.safetensors", "metrics.jsonl"])
    file.unlink()
    kind = random.choice(["pipe", "folder", "loop", "zero", "nowhere", "secret", "lines", "huge"])
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "lines":
        file.write_text(
            "\n".join(json.dumps(odd.mutated({"step": 1, "kind": "valid", "loss": 1.0}, random)[0]) for _ in range(50))
        )
    elif kind == "huge":
        file.touch()
        os.truncate(file, 10**11)
    else:
        file.symlink_to({"loop": file, "zero": "/dev/zero", "nowhere": "/nowhere", "secret": "/etc/passwd"}[kind])
    outcomes = [*_use(run, family, random), regard(["draw", run, "--what", "curves"], home)]
    if random.random() < 0.2:  # it takes some seconds if it is not refused
        train = ["train", run / "recipe.toml", "--out", run, "--device", "cpu", "--set", "training.steps=1"]
        outcomes.append(regard(train, home))
    return "no file", outcomes, f"{family}: {file.name} is a {kind}"


def _data(home: Path, random: Random) -> tuple[str, list[Outcome], str]:
    """Train on a corrupted corpus."""
    bad = random.choice(
        ["bomb", "bytes", "columns", "pipe", "deep", "empty", "noise", "folder", "controls", "compressed"]
    )
    file = home / random.choice(["train.tsv", "train.jsonl", "train.tsv.gz"])
    good = b"a b\tc d\n" * 20
    if bad == "bomb":
        file = home / "train.tsv.gz"
        with gzip.open(file, "wb", 1) as out:
            out.write(b"a\tb\n")
            for _ in range(160):
                out.write(bytes(1 << 20))
    elif bad == "pipe":
        os.mkfifo(file)
    elif bad == "folder":
        file.mkdir()
    else:
        content = {
            "bytes": odd.bytes_of(good, random)[0],
            "columns": b"a\tb\tc\n" * 5,
            "deep": odd.deep().encode(),
            "empty": b"\n" * random.choice([0, 1, 100]),
            "noise": random.randbytes(10_000),
            "controls": "\x1b[2J\u202e\x00 a\tb\x85\u2028\n".encode() * 20,
            "compressed": gzip.compress(good)[: random.randrange(40)],
        }[bad]
        file.write_bytes(gzip.compress(content) if file.suffix == ".gz" and bad != "compressed" else content)
    sizes = [
        "model.size=tiny",
        "training.steps=1",
        "training.batch_tokens=64",
        "text.vocabulary=300",
        "training.validate_lines=1",
    ]
    data = [f"data.pairs={file}", f"data.valid=[{file}]"]
    words = [word for entry in sizes + data for word in ("--set", entry)]
    train = regard(["train", "copy", "--out", home / "run", "--device", "cpu", *words], home)
    return "a corpus", [train], bad
