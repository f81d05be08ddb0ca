"""Print figures of the code itself: `python -m bench.structure [CHECKOUT]`.

Lines per package, imports of the package inside functions, class names that are defined twice, and files outside
`models`, `tasks`, `recipes` and `interop` that ask for a model family. Without CHECKOUT also the files that one
training step and one greedily translated sentence pass through on a CPU: what there is to read to understand them.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

FAMILY_PACKAGES = ("models", "tasks", "recipes", "interop", "formats")  # formats: interop before the renaming
FAMILY = re.compile(
    r"settings\.family|model\.family|is_text|\.classifies\b|\.fills\b"
    r"|isinstance\([^)]*\b(?:Bert|GPT|Transformer|Recurrent)(?:Settings)?\b"
)


def source_figures(root: Path) -> None:
    lines: Counter[str] = Counter()
    inner: Counter[str] = Counter()
    families: Counter[str] = Counter()
    classes = defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        name = str(file.relative_to(root))
        package = name.partition("/")[0] if "/" in name else "(modules)"
        text = file.read_text()
        tree = ast.parse(text)
        lines[package] += text.count("\n")
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        imports = {node for function in functions for node in ast.walk(function) if _is_internal(node)}
        inner[name] += len(imports)
        if package not in FAMILY_PACKAGES:
            families[name] += len(FAMILY.findall(text))
    print("lines", sum(lines.values()), dict(lines))
    print("imports inside functions", sum(inner.values()), dict(+inner))
    print("files that ask for a family", len(+families), dict(+families))
    print("duplicate class names", {name: files for name, files in classes.items() if len(files) > 1})


def _is_internal(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "regard"
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "regard" for alias in node.names)


def reading_figures() -> None:
    import regard
    from regard.recipes import load
    from regard.training.loop import Trainer

    root = Path(regard.__file__).parent
    train_step, update = set[str](), Trainer._update
    with tempfile.TemporaryDirectory() as folder:

        def traced(trainer: Trainer, *batches: Any) -> None:
            if trainer.progress.step == 3:
                _files(lambda: (trainer.packer.batch_at(2), update(trainer, *batches)), root, train_step)
            else:
                update(trainer, *batches)

        Trainer._update = traced  # type: ignore[method-assign]
        recipe = load("en-es", ["training.steps=4", "training.validate_lines=20"])
        regard.train(recipe, Path(folder) / "run", device="cpu", quiet=True)
        model = regard.load(Path(folder) / "run", device="cpu")
        model.translate("this cat is very large", beam=1)
        greedy = set[str]()
        translator = model.translator(beam=1)
        _files(lambda: translator(["this cat is very large"]), root / "decoding", greedy)
    for what, files in (("a training step", train_step), ("greedy decoding, in decoding/", greedy)):
        count = {name: len(Path(name).read_text().splitlines()) for name in sorted(files)}
        print(what, len(count), "files,", sum(count.values()), "lines")
        print("   ", {str(Path(name).relative_to(root)): lines for name, lines in count.items()})


def _files(call: Callable[[], Any], root: Path, found: set[str]) -> None:
    """Add the files below `root` whose functions run during a call."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(root)):
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    source_figures(checkout / "src" / "regard")
    if len(sys.argv) == 1:
        reading_figures()
