"""The wheel: its contents, and that it works without the sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    code = f"from hatchling.build import build_wheel; build_wheel({str(out)!r})"  # what pip and build would call
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    return file


def test_a_wheel_contains_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    sources = [file for file in (ROOT / "src").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert inside == {file.relative_to(ROOT / "src").as_posix() for file in sources}
    for name in ("recipes/copy.toml", "data/builtin/lexicon.tsv", "data/public_sets.toml", "py.typed"):
        assert f"regard/{name}" in inside
    assert len([name for name in inside if name.startswith("regard/recipes/") and name.endswith(".toml")]) >= 9
    info = wheel.name.rsplit("-", 3)[0] + ".dist-info"
    assert {f"{info}/METADATA", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names
    assert "regard = regard.cli:main" in zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()


def test_an_installed_wheel_lists_recipes_and_trains_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = Path(python("-c", "import regard; print(regard.__file__)").strip())
    assert where == site / "regard" / "__init__.py"  # PYTHONPATH comes before installed packages
    listed = python("-m", "regard", "recipes")
    assert all(name in listed for name in ("copy", "reverse", "sort", "en-es", "multi30k-en-de", "wmt14-en-de-big"))
    changes = ["model.width=8", "model.heads=1", "training.steps=5", "data.count=50", "training.validate_lines=2"]
    python("-m", "regard", "train", "copy", "--device", "cpu", *(word for c in changes for word in ("--set", c)))
    last = json.loads((elsewhere / "runs" / "copy" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 5


def test_decoding_does_not_load_the_compiler() -> None:
    """Loading it takes longer than translating a sentence."""
    code = "import sys, regard.decoding, regard.models; assert not {'torch._dynamo', 'triton'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
