"""Help of all verbs; recipes, fetch, train, evaluate and draw in short."""

from __future__ import annotations

import json
import keyword
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import get_type_hints
from xml.etree import ElementTree

import pytest
import sacrebleu
from typer.models import ArgumentInfo

from regard.cli.app import VERBS, verb
from regard.cli.export import formats
from regard.data.fetch import sets
from regard.recipes import load, names
from regard.registry import EXPORTERS
from regard.resuming import MAY_CHANGE


def _plain(text: str) -> str:
    """Without colours, which some CI systems ask for."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("name", VERBS)
def test_the_help_of_every_verb_shows_an_example(regard, name):
    result = regard(name, "--help")
    assert result.status == 0 and result.err == ""
    assert "Example" in result.out and f"  regard {name}" in _plain(result.out)
    assert regard(name, "-h").out == result.out


def test_help_imports_no_torch_and_equals_that_of_the_real_modules(regard, monkeypatch):
    """Compare with another process, where torch is not imported yet."""
    monkeypatch.setenv("COLUMNS", "100")
    code = (
        "import sys\n"
        "from regard.cli import run\n"
        "for verb in sys.argv[1:]:\n"
        "    assert run([verb, '--help'], True) == 0\n"
        "    print('\\f')\n"
        "files = [getattr(sys.modules.get(name), '__file__', None) for name in ('torch', 'numpy', 'regard.api')]\n"
        "assert files == [None] * 3, files"
    )
    env = {**os.environ, "PYTHONUTF8": "1"}
    quick = subprocess.run([sys.executable, "-c", code, *VERBS], capture_output=True, encoding="utf-8", env=env)
    assert quick.returncode == 0, quick.stderr
    texts = dict(zip(VERBS, quick.stdout.split("\f\n"), strict=False))
    assert {name: _plain(text) for name, text in texts.items()} == {
        name: _plain(regard(name, "--help").out) for name in VERBS
    }


def test_the_formats_in_the_help_are_those_of_the_registry():
    assert formats() == {name: export.__doc__.splitlines()[0] for name, export in EXPORTERS.items()}


@pytest.mark.parametrize("name", VERBS)
def test_the_list_of_verbs_quotes_the_help_of_each(name):
    assert VERBS[name] == " ".join(verb(name).help.partition("\n\n")[0].split())


@pytest.mark.parametrize("name", VERBS)
def test_an_option_whose_metavar_is_its_name_is_declared_by_name(name):
    """typer 0.27 would call it --DEVICE instead of --device."""
    function = f"{name}_" if keyword.iskeyword(name) else name
    hints = get_type_hints(getattr(import_module(f"regard.cli.{function}"), function), include_extras=True)
    for parameter, hint in hints.items():
        for option in getattr(hint, "__metadata__", ()):
            declared = isinstance(option.default, str) or isinstance(option, ArgumentInfo)
            assert declared or (option.metavar or "").lower() != parameter


def test_the_help_lists_the_verbs_and_says_how_to_start(regard):
    result = regard("--help")
    assert result.status == 0
    assert all(f" {name} " in _plain(result.out) for name in VERBS)
    assert "regard train en-es" in _plain(result.out)


def test_regard_alone_shows_the_help_and_nothing_else(regard):
    result = regard()
    assert result.out.rstrip() == regard("--help").out.rstrip() and result.err == ""


def test_help_is_quick():
    """Help must not import torch, which alone takes longer. CPU time, because the machine may be busy."""
    seconds = []
    for words in ([], ["translate"]) * 2:
        begun = os.times()
        command = [sys.executable, "-m", "regard", *words, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        now = os.times()
        spent = now.children_user + now.children_system - begun.children_user - begun.children_system
        seconds.append(spent)
    assert "Usage: regard " in _plain(done.stdout) and done.stderr == ""  # python -m regard is regard
    assert min(seconds[::2]) < 0.5 and min(seconds[1::2]) < 0.5


def _imported(*words: str) -> set[str]:
    """The modules that `regard WORDS` imports, in another process."""
    code = f"import sys; from regard.cli import run; run({[*words]}, True); print('loaded:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_listing_the_verbs_imports_none_of_them():
    loaded = _imported("--help")
    assert not {f"regard.cli.{name}" for name in VERBS} & loaded and not {"torch", "numpy", "pydantic"} & loaded


@pytest.mark.parametrize("words", [("recipes",), ("fetch",), ("fetch", "--help")])
def test_verbs_that_need_no_model_do_not_import_torch(words):
    loaded = _imported(*words)
    assert f"regard.cli.{words[0]}" in loaded and not {"torch", "numpy"} & loaded


def test_the_error_for_a_mistyped_verb_suggests_the_nearest(regard):
    assert regard("trian").error == "No such command 'trian'. Did you mean 'train'? (see regard --help)"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("tr", {"train", "transcribe", "translate"}), ("fetch --q", {"--quiet"})],
)
def test_the_shell_completes_verbs_and_options(typed, expected):
    words = ["regard", *typed.split()]
    asked = {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "regard"], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == expected and done.stderr == ""


def test_version(regard):
    assert regard("--version").out == f"regard {version('regard')}\n"


def test_recipes_are_listed_and_printed(regard, tmp_path):
    listed = regard("recipes").out.splitlines()
    assert [line.split()[0] for line in listed] == [name for name, _ in names()]
    assert all(len(line.split()) > 2 for line in listed)
    for name, _ in names():
        file = tmp_path / f"{name}.toml"
        file.write_text(regard("recipes", name).out)
        printed = load(str(file))
        folder = {"data": printed.data.model_copy(update={"folder": load(name).data.folder})}  # a file's own folder
        assert printed.model_copy(update=folder) == load(name)
    assert "steps = 7 " in regard("recipes", "copy", "--set", "training.steps=7").out


def test_fetch_alone_lists_the_data_sets(regard):
    result = regard("fetch")
    assert result.status == 0 and "multi30k" in result.out
    assert all(f"Terms: {known.terms}\n" in result.out for known in sets().values())


def test_fetch_prints_the_terms_before_the_download(regard, tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_MIRROR", "http://127.0.0.1:9")  # nothing listens there
    result = regard("fetch", "tinyshakespeare", "--to", tmp_path)
    assert result.status == 2
    assert result.err.startswith(f"terms of tinyshakespeare: {sets()['tinyshakespeare'].terms}\n")


def test_training_a_finished_run_says_so(regard, train_copy, copied):
    weights = (copied / "model.safetensors").read_bytes()
    result = regard(*train_copy, "--out", copied)
    assert result.status == 0 and result.out == ""
    assert f"regard translate {copied}" in result.err.splitlines()[-1]
    assert (copied / "model.safetensors").read_bytes() == weights
    assert regard(*train_copy, "--out", copied, "--quiet").err == ""


def test_evaluating_two_files_gives_what_sacrebleu_gives(regard, tmp_path):
    outputs = ["the cat sat on the mat", "A dog, then!", "no"]
    references = ["the cat sat on a mat", "a dog, then!", "no"]
    (tmp_path / "out").write_text("\n".join(outputs) + "\n")
    (tmp_path / "ref").write_text("\n".join(references) + "\n")
    words = ["evaluate", "--outputs", tmp_path / "out", "--reference", tmp_path / "ref"]
    for more, lowercase, exact in (([], False, 100 / 3), (["--lowercase"], True, 200 / 3)):
        scores = json.loads(regard(*words, "--json", *more).out)
        bleu = sacrebleu.corpus_bleu(outputs, [references], lowercase=lowercase)
        assert scores["bleu"] == pytest.approx(bleu.score, abs=1e-9)
        assert scores["lines"] == 3 and scores["exact"] == pytest.approx(exact) and scores["perplexity"] is None
        assert ("case:lc" in scores["bleu_signature"]) == lowercase
    scores = json.loads(regard(*words, "--json").out)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, [references]).score, abs=1e-9)
    assert f"BLEU        {scores['bleu']:6.2f}" in regard(*words).out


def test_evaluating_a_run_translates_and_scores(regard, trained, tmp_path):
    (tmp_path / "src").write_text("a b c\nd e\n\n")
    (tmp_path / "ref").write_text("a b c\nd e\n\n")
    saved = tmp_path / "saved.txt"
    words = ["evaluate", trained, "--source", tmp_path / "src", "--reference", tmp_path / "ref", "--beam", 1]
    scores = json.loads(regard(*words, "--json", "--save", saved).out)
    assert scores["lines"] == 3 and scores["perplexity"] > 1
    expected = regard("translate", trained, "--input", tmp_path / "src", "--beam", 1).out
    assert saved.read_text() == expected
    again = json.loads(regard("evaluate", "--outputs", saved, "--reference", tmp_path / "ref", "--json").out)
    assert again["bleu"] == scores["bleu"] and again["chrf"] == scores["chrf"]
    assert "perplexity" in regard(*words).out


def test_drawing_to_a_file_is_xml(regard, trained, tmp_path):
    for name in ("cat.svg", "CAT.SVG"):
        result = regard("draw", trained, "a b <&> c", "--out", tmp_path / name)
        assert result.status == 0 and result.out == ""
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
        text = " ".join(ElementTree.parse(tmp_path / name).getroot().itertext())
        assert all(token in text for token in "abc")


def test_drawing_in_the_terminal_prints_the_tokens(regard, trained):
    result = regard("draw", trained, "q r s", "--target", "d e")
    title, _, head, *rows = result.out.splitlines()
    assert "Cross-attention" in title and head.split()[:3] == ["q", "r", "s"]
    assert [row.split()[0] for row in rows[:2]] == ["d", "e"]
    assert "\x1b" not in result.out
    assert "layer 1 of 1, head 2 of 2" in regard("draw", trained, "q r", "--layer", 1, "--head", 2).out


def test_help_lists_the_settings_that_may_change_on_resume(regard):
    """In the code (each a setting or a section), in the help, and in the guide."""
    from regard.recipes import Recipe
    from regard.recipes.errors import fields_at

    sections = {name: fields_at([name]) for name in Recipe.model_fields}
    known = {*sections, *(f"{section}.{name}" for section, names in sections.items() for name in names)}
    assert set(MAY_CHANGE) <= known
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", _plain(regard("train", "--help").out)).split())
    assert f"and the settings {', '.join(MAY_CHANGE)}." in said
    guide = " ".join((Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8").split())
    assert f"and the settings {', '.join(f'`{name}`' for name in MAY_CHANGE)}. (" in guide
