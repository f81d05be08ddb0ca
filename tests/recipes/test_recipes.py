"""Loading recipes, error messages for invalid ones, and writing them as TOML."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from regard.errors import UserError
from regard.models.transformer_settings import TransformerSettings
from regard.recipes import Recipe, describe, differences, foreign, load, names, parse, to_toml
from regard.recipes.errors import fields_at
from regard.recipes.schema import DecodingSettings
from regard.registry import NameIn

BUILT_IN = [name for name, _ in names()]
RUNGS = ("additive", "dot", "gru", "lstm", "transformer")
ladders = sorted(f"ladder-{corpus}{rung}" for corpus in ("", "multi30k-") for rung in RUNGS)
COPY = '[data]\ncorpus = "copy"\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run every test in its own folder, so that relative names in messages are short and known."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name


def error_of(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(name, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Built-in recipes


def test_list_of_built_in_recipes_with_an_about_each():
    expected = [
        "citations",
        "clutter",
        "copy",
        "cora",
        "decisions",
        "digit-strings",
        "digits",
        "en-es",
        "europarl-en-de",
        "europarl-en-fr",
        "hansards-en-fr",
        "hansards-fr-en",
        "iwslt14-de-en",
        "key-door",
        *ladders,
        "molecules",
        "molecules-text",
        "moods",
        "multi30k-de-en",
        "multi30k-en-de",
        "reverse",
        "scenes",
        "scenes-es",
        "scenes-parts",
        "scenes-parts-es",
        "shakespeare",
        "shakespeare-cpu",
        "shapes",
        "fashion-mnist",
        "fashion-mnist-gpu",
        "images",
        "cifar10",
        "solubility",
        "solubility-text",
        "sort",
        "spoken-en",
        "spoken-en-es",
        "sst2",
        "stories",
        "stories-bert",
        "tatoeba-en-es",
        "tones",
        "wikitext2",
        "wikitext2-bert",
        "wikitext2-words",
        "wmt14-en-de-base",
        "wmt14-en-de-big",
    ]
    assert sorted(expected) == BUILT_IN
    abouts = [about for _, about in names()]
    assert all(abouts) and len(set(abouts)) == len(abouts)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_recipe_loads_and_leaves_the_folder_to_the_user(name):
    recipe = load(name)
    assert recipe.data.folder is None
    assert recipe.about == dict(names())[name]


def test_wmt_recipes_have_the_settings_of_the_paper():
    base, big = load("wmt14-en-de-base"), load("wmt14-en-de-big")
    assert (base.model.width, base.model.ffn_width, base.model.heads, base.model.dropout) == (512, 2048, 8, 0.1)
    assert (big.model.width, big.model.ffn_width, big.model.heads, big.model.dropout) == (1024, 4096, 16, 0.3)
    for recipe, steps, snapshots in ((base, 100_000, 5), (big, 300_000, 20)):
        assert recipe.model.encoder_layers == recipe.model.decoder_layers == 6
        assert not recipe.model.norm_first
        assert (recipe.training.steps, recipe.training.average) == (steps, snapshots)
        assert (recipe.training.warmup, recipe.training.label_smoothing) == (4000, 0.1)
        assert recipe.training.learning_rate is None and recipe.training.betas == (0.9, 0.98)
        assert (recipe.decoding.beam, recipe.decoding.length_penalty) == (4, 0.6)


def test_multi30k_de_en_differs_from_en_de_in_the_files_only():
    changed = differences(load("multi30k-en-de"), load("multi30k-de-en"))
    assert set(changed) == {"about", "data.source", "data.target", "data.valid", "data.test"}
    assert all(list(reversed(old)) == new for old, new in (changed["data.valid"], changed["data.test"]))


def test_hansards_fr_en_differs_from_en_fr_in_the_files_only():
    changed = differences(load("hansards-en-fr"), load("hansards-fr-en"))
    assert set(changed) == {"about", "data.mix", "data.valid", "data.test"}
    for one, other in zip(load("hansards-en-fr").data.mix, load("hansards-fr-en").data.mix, strict=True):
        assert (one.source, one.target, one.weight) == (other.target, other.source, other.weight)


def test_listing_recipes_does_not_import_torch_and_loading_one_is_quick():
    """Loading one imports the modules whose names it may use (`registry.py`), and torch with them."""
    code = "import sys, regard.recipes; regard.recipes.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    load("wmt14-en-de-big")
    began = time.process_time()
    load("wmt14-en-de-big")
    assert time.process_time() - began < 0.2


# --set


def test_set_takes_toml_values_and_bare_words():
    recipe = load(
        "en-es",
        [
            "model.size=small",
            "training.steps = 100",
            'data.valid=["a", "b"]',
            "data.test=[a,b]",  # what remains when the shell removes the quotes
            "training.learning_rate=5e-4",
            "training.betas=[0.9, 0.999]",
            "data.lowercase=true",
            "about=my own words, a=b",
            'data.source_tag="<2es>"',
        ],
    )
    assert recipe.model.size == "small" and recipe.training.steps == 100
    assert recipe.data.valid == recipe.data.test == ["a", "b"]
    assert recipe.training.learning_rate == 5e-4 and recipe.training.betas == (0.9, 0.999)
    assert recipe.data.lowercase is True
    assert recipe.about == "my own words, a=b" and recipe.data.source_tag == "<2es>"


@pytest.mark.parametrize("word", ["2024", "true", "1979-05-27", "[draft]"])
def test_free_text_settings_are_not_parsed_as_toml(word):
    assert load("copy", [f"about={word}"]).about == word


def test_the_last_set_of_a_key_wins():
    assert load("copy", ["training.steps=5", "training.steps=7"]).training.steps == 7


def test_a_new_size_sets_its_fields_except_those_set_with_it():
    everything = write("all.toml", describe(load("multi30k-en-de")))
    tiny = load(everything, ["model.size=tiny", "model.width=64"])
    assert tiny.model.width == 64
    for field in ("heads", "encoder_layers", "decoder_layers", "ffn_width", "dropout"):
        assert getattr(tiny.model, field) == TransformerSettings.PRESETS["tiny"][field]


def test_giving_data_in_another_way_drops_the_inherited_data():
    assert load("multi30k-en-de", ["data.corpus=copy"]).data.source is None
    assert load("copy", ["data.source=a", "data.target=b"]).data.corpus is None
    mixed = load("copy", ['data.mix=[{corpus = "sort"}, {corpus = "reverse", weight = 0.5}]'])
    assert mixed.data.corpus is None and [part.weight for part in mixed.data.mix] == [1.0, 0.5]


# Files, extends and folders


def test_a_file_that_extends_a_recipe_changes_only_its_own_settings():
    mine = load(write("mine.toml", 'extends = "en-es"\n[training]\nsteps = 7\n'))
    assert differences(load("en-es"), mine) == {"training.steps": (load("en-es").training.steps, 7)}


def test_a_file_extends_another_file_relative_to_itself():
    write("base.toml", COPY + "[training]\nsteps = 3\nwarmup = 5\n")
    write("sub/mine.toml", 'extends = "../base.toml"\n[training]\nsteps = 4\n')
    recipe = load("sub/mine.toml", ["training.seed=9"])
    assert (recipe.training.steps, recipe.training.warmup, recipe.training.seed) == (4, 5, 9)


def test_a_recipe_next_to_its_data_works_from_any_directory(here):
    files = '[data]\nsource = "train.en"\ntarget = "train.de"\n'
    write("corpus/plain.toml", files)
    write("corpus/given.toml", files + 'folder = "raw"\n')
    write("corpus/rooted.toml", files + 'folder = "/corpora"\n')
    write("corpus/built-in.toml", 'extends = "multi30k-en-de"\n')
    write("elsewhere/child.toml", 'extends = "../corpus/plain.toml"\n')
    write("toy.toml", COPY)
    assert load("corpus/plain.toml").data.folder == str(here / "corpus")
    assert load("corpus/given.toml").data.folder == str(here / "corpus" / "raw")
    assert load("corpus/rooted.toml").data.folder == "/corpora"
    assert load("corpus/built-in.toml").data.folder == str(here / "corpus")
    assert load("elsewhere/child.toml").data.folder == str(here / "corpus")
    assert load("corpus/plain.toml", ["data.folder=mine"]).data.folder == str(here / "mine")
    assert load("toy.toml").data.folder is None, "a built-in corpus has no files to look for"


def test_a_byte_order_mark_is_no_error():
    assert load(write("bom.toml", "\ufeff" + COPY)).data.corpus == "copy"


# Errors, each of one line


def test_error_for_an_unknown_recipe_suggests_similar_names():
    assert error_of("shapess") == "unknown recipe 'shapess'; did you mean shapes? regard recipes lists them"
    assert error_of("wmt14") == (
        "unknown recipe 'wmt14'; did you mean wmt14-en-de-base or wmt14-en-de-big? regard recipes lists them"
    )
    assert error_of("zzz") == "unknown recipe 'zzz'; regard recipes lists them"
    write("mine.toml", COPY)
    assert error_of("mine") == "unknown recipe 'mine'; did you mean mine.toml? regard recipes lists them"


def test_error_for_a_path_that_is_not_a_recipe_file():
    assert error_of("no.toml") == "no.toml: no such file"
    assert error_of("runs/no") == "runs/no: no such file"
    write("runs/one/recipe.toml", COPY)
    assert error_of("runs/one") == "runs/one: a folder, not a recipe; its recipe is runs/one/recipe.toml"
    assert error_of("runs/") == "runs/: a folder, not a recipe"
    Path("latin.toml").write_bytes('about = "año"'.encode("latin-1"))
    assert error_of("latin.toml") == "latin.toml: not a text file in UTF-8"


def test_a_syntax_error_names_line_and_column():
    write("bad.toml", COPY + "[training]\nsteps 5\n")
    assert error_of("bad.toml").startswith("bad.toml, line 4, column 7: not valid TOML: expected '='")
    write("open.toml", 'about = "')
    assert error_of("open.toml").startswith("open.toml, ")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("[training]\nstep = 5", "line 4: unknown key training.step; did you mean training.steps?"),
        ("\n# step\ntraining.step = 5", "line 5: unknown key data.training; did you mean training?"),
        ("[trainning]\nsteps = 5", "line 3: unknown key trainning; did you mean training?"),
        ("[model]\nlabel_smoothing = 0", "line 4: unknown key model.label_smoothing; "
                                         "did you mean training.label_smoothing?"),
        ("[model]\nzzzzz = 0", "line 4: unknown key model.zzzzz; regard recipes NAME shows every key"),
        ("[training]\nsteps = -3", "line 4: training.steps = -3: must be at least 1"),
        ("[training]\nlearning_rate = 0", "line 4: training.learning_rate = 0: must be more than 0"),
        ("[model]\ndropout = 1", "line 4: model.dropout = 1: must be less than 1"),
        ("[training]\nr_drop = 5\n[model]\ndropout = 0", "line 1: training.r_drop compares two passes that differ in "
                                                       "dropout: model.dropout must not be 0"),
        ("[decoding]\ntop_p = 1.5", "line 4: decoding.top_p = 1.5: must be at most 1"),
        ("[training]\nsteps = 'many'", 'line 4: training.steps = "many": must be a whole number'),
        ("[training]\nsteps = 1.5", "line 4: training.steps = 1.5: must be a whole number"),
        ("[training]\nmax_grad_norm = 'a\\nb'", 'line 4: training.max_grad_norm = "a\\\\nb": must be a number'),
        ("[text]\nshared = 'perhaps'", 'line 4: text.shared = "perhaps": must be true or false'),
        ("folder = 5", "line 3: data.folder = 5: must be text in quotes"),
        ("valid = 'a'", 'line 3: data.valid = "a": must be a list, such as ["a", "b"]'),
        ("valid = []", "line 3: data.valid = []: must have at least 1 entry"),
        ("valid = [\n'a',\n'b', 'c',\n]", 'line 3: data.valid = ["a", "b", "c"]: must have at most 2 entries'),
        ("[training]\nbetas = [0.9]", "line 4: training.betas = [0.9]: must have 2 entries"),
        ("[training]\nbetas = 0.9", "line 4: training.betas = 0.9: must be a list, such as [0.9, 0.98]"),
        ("[model]\nsize = 'huge'", 'line 4: model.size = "huge": must be tiny, small, base or big'),
        ("[model]\nsize = [1]", "line 4: model.size = [1]: must be tiny, small, base or big"),
        ("[model]\nsize = 'tiny'\nheads = 3", "line 3: model: width 128 is not a multiple of heads 3"),
        (
            "source = 'a'",
            "line 1: data: give one of corpus, pairs, text, images, captions, speech, graph, molecules, "
            "trajectories, or source with target",
        ),
        ("[training]\nstep = 5\nsteps = 0\nseed = -1",
         "line 4: unknown key training.step; did you mean training.steps? (and 2 more)"),
    ],
)  # fmt: skip
def test_an_error_in_a_file_names_the_line_and_the_allowed_values(lines, expected):
    write("my.toml", COPY + lines + "\n")
    assert error_of("my.toml") == f"my.toml, {expected}"


def test_errors_in_whole_sections_and_in_entries_of_mix():
    write("flat.toml", "training = 5\n" + COPY)
    assert error_of("flat.toml") == ("flat.toml, line 1: training = 5: must be a section, [training]")
    write("none.toml", "[text]\nunit = 'word'\n")
    assert error_of("none.toml") == "none.toml: the section [data] is missing"
    assert error_of("none.toml", "training.steps=5") == "none.toml: the section [data] is missing"
    write("mix.toml", "[[data.mix]]\ncorpus = 'copy'\n[[data.mix]]\ncorpus = 'sort'\nwieght = 2\n")
    assert error_of("mix.toml") == ("mix.toml, line 5: unknown key data.mix[1].wieght; did you mean data.mix.weight?")
    write("mix.toml", "[[data.mix]]\ncorpus = 'copy'\n[[data.mix]]\ncorpus = 'sort'\nweight = 0\n")
    assert error_of("mix.toml") == "mix.toml, line 5: data.mix[1].weight = 0: must be more than 0"
    assert "count has no effect on a mix" in error_of("scenes", "data.count=5")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.step=5", "--set training.step=5: unknown key training.step; did you mean training.steps?"),
        ("steps=5", "--set steps=5: unknown key steps; did you mean training.steps?"),
        ("lr=0.1", "--set lr=0.1: unknown key lr; did you mean training.learning_rate?"),
        ("training.lr=0.1", "--set training.lr=0.1: unknown key training.lr; did you mean training.learning_rate?"),
        ("training.epochs=3", "--set training.epochs=3: unknown key training.epochs; did you mean training.steps? "
                              "(it counts updates, not epochs)"),
        ("training.batch_size=64", "--set training.batch_size=64: unknown key training.batch_size; "
                                   "did you mean training.batch_tokens? (it counts target tokens, not sentences)"),
        ("training.dropout_rate=0", "--set training.dropout_rate=0: unknown key training.dropout_rate; "
                                    "did you mean model.dropout?"),
        ("model.hidden-size=8", "--set model.hidden-size=8: unknown key model.hidden-size; did you mean model.width?"),
        ("model.num_layers=8", "--set model.num_layers=8: unknown key model.num_layers; "
                               "did you mean model.encoder_layers and model.decoder_layers?"),
        ("device=cpu", "--set device=cpu: unknown key device; did you mean --device?"),
        ("training.steps=-3", "--set training.steps=-3: must be at least 1"),
        ("training.steps=many", "--set training.steps=many: must be a whole number"),
        ("model.size=huge", "--set model.size=huge: must be tiny, small, base or big"),
        ("model.heads=3", "--set model.heads=3: model: width 64 is not a multiple of heads 3"),
        ("training=5", "--set training=5: must be a section, [training]"),
        (
            "data.mix=[{corpus = 3}]",
            "--set data.mix=[{corpus = 3}]: data.mix[0].corpus = 3: must be text in quotes",
        ),
        (
            "data.mix.0.weight=2",
            '--set data.mix.0.weight=2: data.mix = {"0" = {"weight" = 2}}: must be a list, such as ["a", "b"]',
        ),
        ("training.steps", "--set training.steps: must look like section.key=value"),
        ("=5", "--set =5: must look like section.key=value"),
        ("training.=5", "--set training.=5: must look like section.key=value"),
        ('data.valid=["a"', '--set data.valid=["a": the value is neither valid TOML nor a bare word'),
        ("data.source=a", "--set data.source=a: data: source and target go together"),
    ],
)  # fmt: skip
def test_an_error_in_set_quotes_the_option(override, expected):
    assert error_of("copy", override) == expected


def test_an_error_names_the_layer_that_causes_it():
    write("base.toml", COPY + "[training]\nsteps = 0\n")
    write("child.toml", 'extends = "base.toml"\n[training]\nwarmup = 5\n')
    expected = "base.toml, line 4: training.steps = 0: must be at least 1"
    assert error_of("child.toml") == error_of("child.toml", "training.seed=3", "training.max_grad_norm=2") == expected
    assert load("child.toml", ["training.steps=1"]).training.steps == 1, "a later layer corrects it"
    write("half.toml", '[data]\nsource = "a"\n')
    expected = "half.toml, line 1: data: source and target go together"
    assert error_of("half.toml", "data.lowercase=true") == expected
    several = error_of("copy", "training.seed=2", "model.heads=3", "model.width=100")
    assert several == "--set model.heads=3 --set model.width=100: model: width 100 is not a multiple of heads 3"


def test_extends_of_a_missing_recipe_or_in_a_cycle():
    write("a.toml", 'extends = "b.toml"\n')
    write("b.toml", '# a comment\nextends = "a.toml"\n')
    assert error_of("a.toml") == ("b.toml, line 2: extends forms a cycle: a.toml -> b.toml -> a.toml")
    write("self.toml", 'extends = "self.toml"\n')
    assert error_of("self.toml") == "self.toml, line 1: extends forms a cycle: self.toml -> self.toml"
    write("lost.toml", 'extends = "no.toml"\n')
    assert error_of("lost.toml") == "lost.toml, line 1: no.toml: no such file"
    write("typo.toml", 'extends = "multi30k"\n')
    assert error_of("typo.toml") == (
        "typo.toml, line 1: unknown recipe 'multi30k'; "
        "did you mean multi30k-en-de or multi30k-de-en? regard recipes lists them"
    )
    write("two.toml", 'extends = ["copy", "sort"]\n')
    assert error_of("two.toml") == (
        'two.toml, line 1: extends = ["copy", "sort"]: must be the name of one recipe, in quotes'
    )


# Writing


@pytest.mark.parametrize("name", BUILT_IN)
def test_parse_of_describe_gives_an_equal_recipe(name, here):
    recipe = load(name)
    assert parse(describe(recipe)) == parse(to_toml(recipe)) == recipe
    placed = load(write("written.toml", describe(recipe)))
    expected = {} if recipe.data.corpus else {"data.folder": (None, str(here))}
    assert differences(recipe, placed) == expected
    assert load(write("deeper/again.toml", describe(placed))) == placed, "an absolute folder does not change"


@pytest.mark.parametrize(
    "awkward",
    [
        'say "hi"',
        "back\\slash",
        "two\nlines\r\n\tand a tab",
        "ñandú 漢字 🙂",
        "\x00\x1f\x7f\x85\u2028",
        "# = [x]",
        "'''",
        '"""',
    ],
)
def test_any_text_can_be_written_to_toml_and_read_back(awkward):
    recipe = Recipe.model_validate(
        {"about": awkward, "data": {"mix": [{"corpus": awkward}, {"pairs": "x", "source_tag": awkward, "count": 3}]}}
    )
    assert parse(describe(recipe)) == recipe


@pytest.mark.parametrize("number", [1e-9, 5e-4, 0.1, 1.0, 123456789.125, 1e22])
def test_any_number_can_be_written_to_toml_and_read_back(number):
    recipe = load("copy", [f"data.weight={number!r}"])
    assert recipe.data.weight == number
    assert parse(describe(recipe)).data.weight == number


@pytest.mark.parametrize(("name", "others"), [("multi30k-en-de", {"augment"}), ("cifar10", {"text", "decoding"})])
def test_describe_lists_every_setting_with_its_description_and_choices(name, others):
    recipe = load(name)
    lines = describe(recipe).splitlines()
    sections = [section for section in Recipe.model_fields if section not in others]
    for section in (getattr(recipe, section) for section in sections[2:]):
        for key, field in type(section).model_fields.items():
            if section is recipe.data and key in recipe.data.unused:
                continue
            begin = f"# {key} =" if getattr(section, key) is None else f"{key} = "
            kinds = [field.annotation, *get_args(field.annotation)]
            parts = [*field.metadata, *(part for kind in kinds for part in get_args(kind))]
            choices = [part.names() for part in parts if isinstance(part, NameIn)]
            choices += [get_args(kind) for kind in kinds if get_origin(kind) is Literal and len(get_args(kind)) > 1]
            end = "".join([f"  # {field.description}", *(f" [{', '.join(map(str, names))}]" for names in choices)])
            assert any(line.startswith(begin) and line.endswith(end) for line in lines)
    at = lines.index("[training]")
    assert lines[at - 1] == "# Training: batches, optimizer, learning rate, validation, checkpoints."
    columns = {line.rindex("  # ") for line in lines[at + 1 : lines.index("", at)]}
    assert len(columns) == 1
    assert list(tomllib.loads(describe(recipe))) == sections


def test_errors_in_a_stored_recipe_name_its_file():
    with pytest.raises(UserError, match=r"^runs/x/recipe.toml, line 4: training.steps = 0: must be at least 1$"):
        parse(COPY + "[training]\nsteps = 0\n", name="runs/x/recipe.toml")


def test_differences_are_old_and_new_by_dotted_key():
    old = load("copy")
    new = load("copy", ["training.steps=601", "decoding.beam=1", "training.learning_rate=0.1"])
    assert differences(old, old) == {}
    assert differences(old, new) == {
        "training.steps": (1200, 601),
        "training.learning_rate": (0.004, 0.1),
        "decoding.beam": (4, 1),
    }
    mixed = load("copy", ['data.mix=[{corpus = "sort"}]'])
    assert set(differences(old, mixed)) == {"data.corpus", "data.mix"}


def test_a_size_drops_only_the_settings_that_sizes_of_its_family_determine():
    """The sizes of GPT determine max_positions; those of BERT do not, so that the recipe's remains."""
    assert load("stories-bert", ["model.size=small"]).model.max_positions == 128
    assert load("stories-bert", ["model.size=small"]).model.layers == 4
    assert load("stories", ["model.size=mini"]).model.max_positions == 256


def test_one_vocabulary_has_one_unit_and_rotary_heads_are_even():
    assert error_of("copy", "text.target_unit=word", "text.unit=bpe").endswith("one vocabulary has one unit")
    assert error_of("stories", "model.width=20", "model.heads=4").endswith(
        "need an even width of a head, which is width / heads = 5"
    )


def test_names_of_other_toolkits_map_to_existing_settings():
    known = {f"{section}.{name}" for section in Recipe.model_fields for name in fields_at([section])}
    for name, ours in foreign.SETTINGS.items():
        assert all(setting in known or setting.startswith("--") for setting in ours), name
    assert foreign.UNITS.keys() <= known


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("en-es", ["data", "text", "model", "training", "decoding"]),
        ("stories-bert", ["data", "text", "model", "training"]),
        ("moods", ["data", "text", "model", "training"]),
        ("shapes", ["data", "model", "training", "augment"]),
    ],
)
def test_only_sections_that_have_an_effect_are_printed(name, sections):
    printed = describe(load(name))
    assert re.findall(r"^\[(\w+)\]", printed, re.MULTILINE) == sections
    assert parse(printed) == load(name)
    assert ("lowercase" in printed) == (name != "shapes")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("shapes", "decoding.beam=3", '[decoding] has no effect for task = "image-classification": leave it out'),
        ("shapes", "text.vocabulary=300", '[text] has no effect for task = "image-classification": leave it out'),
        ("shapes", "data.lowercase=true", "data.lowercase is for texts and has no effect"),
        ("en-es", "data.speeds=[0.9]", "data.speeds is for speech and has no effect"),
        ("moods", "decoding.beam=3", '[decoding] has no effect for task = "classification": leave it out'),
    ],
)
def test_settings_that_have_no_effect_are_refused(name, change, message):
    with pytest.raises(UserError) as refused:
        load(name, [change])
    assert f"--set {change}: {message}" in str(refused.value)


def test_another_family_drops_the_sections_that_it_does_not_use():
    assert load("stories", ["model.family=bert"]).decoding == DecodingSettings()
    assert load("stories", ["model.width=64"]).decoding == load("stories").decoding != DecodingSettings()
