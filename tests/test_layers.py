"""Imports inside the package follow the layers drawn in CONTRIBUTING.md, inside functions too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import regard

PACKAGE = Path(regard.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"
ENTRY_POINTS = ("__init__", "__main__")  # of the package itself: above all layers
MAX_IMPORTS_IN_FUNCTIONS = 8  # lower it when one disappears; Triton's modules must be imported on GPUs alone


@dataclass(frozen=True)
class Import:
    """An import of a module of the package."""

    importer: str  # dotted names without "regard."
    imported: str
    line: int
    in_function: bool


def layers(text: str) -> dict[str, int]:
    """The layer of each top-level module in the diagram below the heading "Layers", 0 for the highest."""
    section = text.partition("\n## Layers\n")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    names = [re.split(r"  +", line)[0].split(", ") for line in lines]
    return {name: layer for layer, group in enumerate(names) for name in group}


def modules() -> dict[str, Path]:
    """The files of all modules by their dotted names without "regard."."""
    files = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name.replace("/", ".").removesuffix(".__init__"): path for name, path in files.items()}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(importer: str, tree: ast.Module, is_package: bool = False) -> Iterator[Import]:
    """The imports of a module that lead into this package."""
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in nodes:
        for name in _imported(node, importer, is_package):
            if name.startswith("regard."):
                yield Import(importer, name.removeprefix("regard."), node.lineno, id(node) in inside)  # type: ignore[attr-defined]


def _imported(node: ast.AST, importer: str, is_package: bool) -> list[str]:
    """The full names that an import statement may refer to."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        above = f"regard.{importer}".split(".")[: len(f"regard.{importer}".split(".")) - node.level + is_package]
        base = ".".join([*above, *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]


def upward(found: Import, layer: dict[str, int]) -> bool:
    """Whether an import leads to another top-level module that is not in a lower layer."""
    importer, imported = found.importer.split(".")[0], found.imported.split(".")[0]
    return importer != imported and imported in layer and layer[imported] <= layer[importer]


@cache
def all_imports() -> list[Import]:
    return [
        found
        for name, path in modules().items()
        if name not in ENTRY_POINTS
        for found in imports(name, parsed(path), path.name == "__init__.py")
    ]


def test_the_diagram_names_every_module_once() -> None:
    drawn = layers(CONTRIBUTING.read_text(encoding="utf-8"))
    assert set(drawn) == {name.split(".")[0] for name in modules()} - set(ENTRY_POINTS)


def test_imports_point_to_lower_layers() -> None:
    layer = layers(CONTRIBUTING.read_text(encoding="utf-8"))
    wrong = [f"{found.importer}:{found.line}: {found.imported}" for found in all_imports() if upward(found, layer)]
    assert not wrong


def test_few_imports_stand_inside_functions() -> None:
    inside = {(found.importer, found.line) for found in all_imports() if found.in_function}
    assert len(inside) <= MAX_IMPORTS_IN_FUNCTIONS, sorted(inside)


@pytest.mark.parametrize(
    "statement",
    [
        "from regard.api import load",
        "from regard import api",
        "import regard.api as front",
        "from ..api import load",
        "from .. import api",
        "def f():\n    from regard.api import load",
        "if TYPE_CHECKING:\n    from regard.api import Model",
        "from regard.sibling import name",
    ],
)
def test_an_import_of_an_upper_or_equal_layer_is_found(statement: str) -> None:
    layer = layers("\n## Layers\n\n    api       functions\n    nn, sibling   blocks\n    packed\n\n## More\n")
    assert layer == {"api": 0, "nn": 1, "sibling": 1, "packed": 2}
    (found,) = imports("nn.blocks", ast.parse(statement))
    assert upward(found, layer) and found.in_function == statement.startswith("def")


def test_imports_of_lower_layers_and_of_the_same_package_are_allowed() -> None:
    source = "import torch\nfrom regard.packed import SeqBatch\nfrom regard.nn import norms\nfrom . import norms"
    found = list(imports("nn.blocks", ast.parse(source)))
    assert [one.imported for one in found] == ["packed.SeqBatch", "nn.norms", "nn.norms"]
    assert not any(upward(one, {"api": 0, "nn": 1, "packed": 2}) for one in found)


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, str] = {}
    for module, path in modules().items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                assert node.name not in found, f"{node.name} is a class in {found[node.name]} and in {module}"
                found[node.name] = module
