"""Training data passed from Python: rows are written to a file in the cache, on which a run is trained and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.data.in_memory import file_of
from regard.errors import UserError
from regard.recipes.schema import Recipe
from regard.text import UNK

PAIRS = [("ja", "yes"), ("nein", 'no, "never"\n'), ("größer", "larger")]
NAMES = ["source", "target"]


def rows(path: str) -> list[tuple[str, ...]]:
    return [tuple(json.loads(line).values()) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_rows_may_have_many_types() -> None:
    pandas = pytest.importorskip("pandas")
    de, en = zip(*PAIRS, strict=True)
    dicts = [{"de": one, "en": other} for one, other in PAIRS]
    named = ["de", "en"]
    forms = [
        (iter(PAIRS), None),
        ([list(pair) for pair in PAIRS], None),
        (np.array(PAIRS), None),
        ([{"target": other, "source": one} for one, other in PAIRS], None),
        (dicts, named),
        ([{"translation": row} for row in dicts], named),
        ({"de": de, "en": en}, None),
        ({"en": en, "de": de}, named),
        (pandas.DataFrame(PAIRS), None),
        (pandas.DataFrame({"id": [1, 2, 3], "en": en, "de": de}), named),
    ]
    files = {file_of(given, NAMES, columns, "pairs") for given, columns in forms}
    assert len(files) == 1 and rows(files.pop()) == PAIRS
    assert rows(file_of(pandas.Series(de), ["text"], None, "texts")) == [(text,) for text in de]


@pytest.mark.slow  # importing datasets takes seconds
def test_rows_from_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    de, en = zip(*PAIRS, strict=True)
    dicts = [{"translation": {"de": one, "en": other}} for one, other in PAIRS]
    for given in (datasets.Dataset.from_list(dicts), datasets.Dataset.from_dict({"en": en, "de": de})):
        assert rows(file_of(given, NAMES, ["de", "en"], "pairs")) == PAIRS


@pytest.mark.parametrize(
    ("given", "columns", "message"),
    [
        ([("a", "b"), ("c",)], None, r"^pairs, row 1: expected source and target, not \('c',\)"),
        (["ab"], None, "pairs, row 0: expected source and target, not 'ab'"),
        ([("a", 3)], None, r"pairs, row 0: target must be a string, not int \(3\)"),
        ([("a", float("nan"))], None, "target must be a string, not float"),
        (3, None, "pairs: expected rows of source and target, a DataFrame or a Dataset, not 3"),
        ([{"de": "a", "en": "b"}], None, "row 0 has no column 'source': it has de, en; name the columns with columns="),
        ({"de": ["a"], "en": ["b"]}, ["de", "fr"], "has no column 'fr': it has de, en"),
        ([("a", "\ud800")], None, "not valid Unicode"),
    ],
)
def test_a_row_that_is_not_a_pair_is_an_error(given: object, columns: list[str] | None, message: str) -> None:
    with pytest.raises((TypeError, UserError), match=message):
        file_of(given, NAMES, columns, "pairs")


TINY = {
    "model.width": 8,
    "model.heads": 1,
    "training.steps": 2,
    "training.validate_lines": 0,
    "training.batch_tokens": 64,
}


def test_a_run_is_trained_on_pairs_and_resumed_with_the_same(tmp_path: Path) -> None:
    given = [(f"a{n} b", f"b a{n}") for n in range(40)]

    def train(pairs: object, steps: int) -> regard.Model:
        settings = {**TINY, "training.steps": steps}
        valid = iter(given[:4])
        return regard.train("reverse", tmp_path / "run", pairs=pairs, valid=valid, settings=settings, quiet=True)

    model = train(iter(given), 2)
    assert model.run.recipe.data.corpus is None and model.run.recipe.data.count is None
    assert train(given, 3).run.recipe.training.steps == 3
    with pytest.raises(UserError, match=r"was made by another recipe: data\.pairs"):
        train(given[1:], 4)
    with pytest.raises(UserError, match="needs data to validate on: give valid= as well"):
        regard.train("reverse", tmp_path / "other", pairs=given, settings=TINY)
    with pytest.raises(UserError, match="pairs or texts, not both"):
        regard.train("reverse", tmp_path / "other", pairs=given, texts=["a"])


def test_a_language_model_is_trained_on_texts(tmp_path: Path) -> None:
    texts = [f"line {n}\nand more" for n in range(30)]
    settings = {**TINY, "model.ffn_width": 16, "model.layers": 1}
    model = regard.train("stories", tmp_path / "run", texts=texts, valid=texts[:3], settings=settings, quiet=True)
    assert model.run.recipe.data.kind == "text" and model.generate("line", tokens=2).text


def test_settings_change_a_recipe_that_is_an_object(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"data": {"corpus": "copy", "count": 30}})
    model = regard.train(recipe, tmp_path / "run", settings=[f"{k}={v}" for k, v in TINY.items()], quiet=True)
    assert model.run.recipe.training.steps == 2


def test_a_quoted_file_is_unquoted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.tsv"
    file.write_text('"de"\t"en"\n' + "".join(f'"a{n} ""b"""\t"c{n}, d"\n' for n in range(30)), encoding="utf-8")
    model = regard.train("copy", tmp_path / "run", pairs=file, valid=file, settings=TINY, device="cpu")
    output = capsys.readouterr()
    assert (output.out + output.err).replace("\n", " ").count("a.tsv: header de, en; quoted fields") == 1
    source = model.run.tokenizers[0]
    assert UNK not in source.encode('a1 "b"') and UNK in source.encode('"a1')
