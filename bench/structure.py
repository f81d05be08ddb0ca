"""Print figures of the code itself: `python -m bench.structure [CHECKOUT]`.

Lines per package, imports of the package inside functions, class names that are defined twice, and files outside
`models`, `tasks`, `recipes` and `interop` that depend on the model family: that compare it, use it as a key, or test
for a class of `models` with `isinstance`. Naming the family in a message does not count. Without CHECKOUT also the
files that one training step and one greedily translated sentence pass through on a CPU, with the lines of each file and
of the functions in it that run: what there is to read to understand them.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FAMILY_PACKAGES = ("models", "tasks", "recipes", "interop", "formats")  # formats: interop before the renaming
INTERFACES = ("base.py", "decoder_state.py", "ensemble.py")  # of models: not about one family


def source_figures(root: Path) -> None:
    lines: Counter[str] = Counter()
    inner: Counter[str] = Counter()
    families: Counter[str] = Counter()
    classes = defaultdict(list)
    files = [file for file in (root / "models").glob("*.py") if file.name not in INTERFACES]
    family_classes = {
        node.name for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
    }
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
            families[name] += sum(_depends_on_family(node, family_classes) for node in ast.walk(tree))
    print("lines", sum(lines.values()), dict(lines))
    print("imports inside functions", sum(inner.values()), dict(+inner))
    print("files that depend on the family", len(+families), dict(+families))
    print("duplicate class names", {name: files for name, files in classes.items() if len(files) > 1})


def _is_internal(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "regard"
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "regard" for alias in node.names)


def _depends_on_family(node: ast.AST, family_classes: set[str]) -> bool:
    """Whether an expression compares the family, uses it as a key, or tests for one of these classes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return any(isinstance(name, ast.Name) and name.id in family_classes for name in ast.walk(node.args[1]))
    if isinstance(node, ast.Compare | ast.Match):
        return any(map(_is_family, ast.walk(node.subject if isinstance(node, ast.Match) else node)))
    return isinstance(node, ast.Subscript) and any(map(_is_family, ast.walk(node.slice)))


def _is_family(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "family"
    return isinstance(node, ast.Attribute) and node.attr == "family"


def reading_figures() -> None:
    import regard
    from regard.recipes import load
    from regard.training.loop import Trainer

    root = Path(regard.__file__).parent
    train_step, greedy, update = set[CodeType](), set[CodeType](), Trainer._take_step
    with tempfile.TemporaryDirectory() as folder:

        def traced(trainer: Trainer, *batches: Any) -> None:
            if trainer.progress.step == 3:
                _functions(lambda: (trainer.stream.batch_at(2), update(trainer, *batches)), root, train_step)
            else:
                update(trainer, *batches)

        Trainer._take_step = traced  # type: ignore[method-assign]
        recipe = load("en-es", ["training.steps=4", "training.validate_lines=20"])
        regard.train(recipe, Path(folder) / "run", device="cpu", quiet=True)
        model = regard.load(Path(folder) / "run", device="cpu")
        model.translate("this cat is very large", beam=1)
        translator = model.translator(beam=1)
        _functions(lambda: translator(["this cat is very large"]), root / "decoding", greedy)
    for what, functions in (("a training step", train_step), ("greedy decoding, in decoding/", greedy)):
        print(what)
        totals = [0, 0]
        for file in sorted({function.co_filename for function in functions}):
            lines = len(Path(file).read_text().splitlines())
            run = _lines({function for function in functions if function.co_filename == file})
            totals = [totals[0] + lines, totals[1] + run]
            print(f"    {lines:5} lines, {run:4} of functions that run: {Path(file).relative_to(root)}")
        files = len({function.co_filename for function in functions})
        print(f"    {files} files, {totals[0]} lines, {totals[1]} of functions that run")


def _functions(call: Callable[[], Any], root: Path, found: set[CodeType]) -> None:
    """Add the functions below `root` that run during a call."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(root)):
            found.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)


def _lines(functions: set[CodeType]) -> int:
    """The source lines of functions of one file, with their docstrings; nested functions are counted once."""
    lines = set[int]()
    for function in functions:
        lines |= {*range(function.co_firstlineno, max(line or 0 for *_, line in function.co_lines()) + 1)}
    return len(lines)


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    source_figures(checkout / "src" / "regard")
    if len(sys.argv) == 1:
        reading_figures()
