"""The English-Spanish corpus: its Spanish is right, its splits keep apart what they promise to, its links hold."""

import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

from regard.data.builtin import CORPORA, Pair, en_es, pairs, splits
from regard.data.builtin.function_words import PLURAL, SINGULAR
from regard.data.builtin.lexicon import lexicon
from regard.data.builtin.pairings import choices, held_out
from regard.data.builtin.sentence import Sentence
from regard.data.builtin.spanish import adjective_forms, conjugate, plural
from regard.errors import UserError


@pytest.fixture(scope="module")
def train() -> list[Sentence]:
    return list(islice(en_es.derivations("train"), 60_000))


@pytest.fixture(scope="module")
def unseen() -> list[Sentence]:
    return list(islice(en_es.derivations("test"), en_es.COUNTS["test"]))


def source(s: Sentence) -> str:
    return " ".join(s.source)


# the languages


@pytest.mark.parametrize(
    ("infinitive", "change", "tense", "forms"),
    [
        ("ser", "", "present", "soy eres es somos son"),
        ("estar", "", "preterite", "estuve estuviste estuvo estuvimos estuvieron"),
        ("tener", "", "future", "tendré tendrás tendrá tendremos tendrán"),
        ("ir", "", "preterite", "fui fuiste fue fuimos fueron"),
        ("decir", "", "preterite", "dije dijiste dijo dijimos dijeron"),
        ("hacer", "", "preterite", "hice hiciste hizo hicimos hicieron"),
        ("dormir", "ue", "preterite", "dormí dormiste durmió dormimos durmieron"),
        ("cerrar", "ie", "present", "cierro cierras cierra cerramos cierran"),
        ("servir", "i", "present", "sirvo sirves sirve servimos sirven"),
        ("seguir", "i", "present", "sigo sigues sigue seguimos siguen"),
        ("elegir", "i", "present", "elijo eliges elige elegimos eligen"),
        ("buscar", "", "preterite", "busqué buscaste buscó buscamos buscaron"),
        ("llegar", "", "preterite", "llegué llegaste llegó llegamos llegaron"),
        ("cazar", "", "preterite", "cacé cazaste cazó cazamos cazaron"),
        ("conocer", "", "present", "conozco conoces conoce conocemos conocen"),
        ("construir", "", "preterite", "construí construiste construyó construimos construyeron"),
        ("enviar", "í", "present", "envío envías envía enviamos envían"),
        ("oír", "", "future", "oiré oirás oirá oiremos oirán"),
        ("comer", "", "imperfect", "comía comías comía comíamos comían"),
    ],
)
def test_verbs_are_conjugated_as_in_a_grammar_book(infinitive: str, change: str, tense: str, forms: str) -> None:
    assert " ".join(getattr(conjugate(infinitive, change), tense)) == forms


@pytest.mark.parametrize(
    ("one", "many"),
    [("gato", "gatos"), ("flor", "flores"), ("juez", "jueces"), ("jardín", "jardines"), ("autobús", "autobuses"),
     ("canción", "canciones"), ("sofá", "sofás"), ("rey", "reyes"), ("lápiz", "lápices")],
)  # fmt: skip
def test_plurals_keep_the_stress_where_it_was(one: str, many: str) -> None:
    assert plural(one) == many


def test_adjectives_have_four_forms_some_of_them_equal() -> None:
    assert adjective_forms("rojo") == (("rojo", "rojos"), ("roja", "rojas"))
    assert adjective_forms("grande") == (("grande", "grandes"), ("grande", "grandes"))
    assert adjective_forms("francés/francesa") == (("francés", "franceses"), ("francesa", "francesas"))


def test_the_lexicon_has_over_600_content_words_and_an_english_form_belongs_to_one_of_them() -> None:
    words = lexicon()
    forms: Counter[str] = Counter()
    for noun in words.nouns:
        forms.update({noun.english[0]} if noun.mass else set(noun.english))
        assert noun.mass or noun.english[0] != noun.english[1]  # else the number could not be seen
    for verb in words.verbs:
        forms.update({form for row in verb.english for form in row})
        assert verb.frame == "modal" or verb.name != verb.english[1][0]  # else the tense could not be seen
    forms.update(word.name for word in (*words.adjectives, *words.adverbs))
    assert [form for form, lexemes in forms.items() if lexemes > 1] == []
    assert len(words.nouns) + len(words.verbs) + len(words.adjectives) + len(words.adverbs) >= 600


def test_no_feminine_noun_would_need_the_article_el() -> None:
    """None begins with a stressed a: with á, or with a in a word of two vowels that ends in one of them."""
    nouns = (noun.spanish[0].removeprefix("h") for noun in lexicon().nouns if noun.feminine)
    assert [n for n in nouns if n[0] == "á" or (n[0] == n[-1] == "a" and sum(c in "aeiou" for c in n) == 2)] == []


def test_a_sentence_has_one_translation_whatever_split_it_is_drawn_for(train: list[Sentence]) -> None:
    translations = {source(s): s.target for s in train}
    for split in ("test", "valid", "shapes"):
        for s in islice(en_es.derivations(split, seed=5), 1500):
            assert translations.setdefault(source(s), s.target) == s.target
    assert all(translations[source(s)] == s.target for s in train)


def test_contractions_and_euphonic_conjunctions_are_made_everywhere(train: list[Sentence]) -> None:
    text = "\n".join(" ".join(s.target) for s in train)
    assert " del " in text and " al " in text and " e i" in text
    for wrong in (" a el ", " de el ", " y i", " y hi", " o o", " y e ", "  "):
        assert wrong not in text, wrong


# the splits


def test_the_corpus_names_its_splits_and_refuses_others_in_one_line() -> None:
    assert CORPORA == ("en-es", "stories", "moods", "molecules", "smiles", "copy", "reverse", "sort")
    assert splits("en-es") == ("train", "valid", "test", "shapes")
    with pytest.raises(UserError, match="no built-in corpus 'en-fr'; there are en-es"):
        splits("en-fr")
    with pytest.raises(UserError, match="has no split 'dev'; it has train, valid"):
        pairs("en-es", "dev")


def test_the_example_is_a_test_sentence_and_its_pairing_is_not_in_training(train: list[Sentence]) -> None:
    example = next(pairs("en-es", "test"))
    links = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4))
    assert example == Pair("this cat is very large", "este gato es muy grande", links, frozenset({"determiner"}))
    assert held_out("adjective", "cat", "large")
    assert not any({"cat", "large"} <= set(s.source) and ("adjective", "cat", "large") in s.pairings for s in train)


def test_every_test_sentence_has_a_pairing_that_training_never_shows(
    train: list[Sentence], unseen: list[Sentence]
) -> None:
    trained = {pairing for s in train for pairing in s.pairings}
    assert not any(held_out(*pairing) for pairing in trained)
    for s in unseen:
        new = [pairing for pairing in s.pairings if held_out(*pairing)]
        assert new and trained.isdisjoint(new)
    for split in ("valid", "shapes"):
        assert not any(held_out(*p) for s in islice(en_es.derivations(split), 500) for p in s.pairings)


def test_held_out_adjectives_are_found_absent_by_reading_the_text_alone(train: list[Sentence]) -> None:
    """Independent of the recorded derivation: an English adjective right before a noun describes it."""
    nouns = {form: noun.name for noun in lexicon().nouns for form in noun.english}
    adjectives = {adjective.name for adjective in lexicon().adjectives}
    met = {(nouns[b], a) for s in train for a, b in zip(s.source, s.source[1:], strict=False)
           if a in adjectives and b in nouns}  # fmt: skip
    assert len(met) > 5_000
    assert not any(held_out("adjective", noun, adjective) for noun, adjective in met)


def test_every_test_word_occurs_in_training(train: list[Sentence], unseen: list[Sentence]) -> None:
    assert {word for s in unseen for word in s.source} <= {word for s in train for word in s.source}
    lexemes = {name for s in train for pairing in s.pairings for name in pairing[1:]}
    assert {name for s in unseen for pairing in s.pairings for name in pairing[1:]} <= lexemes


def test_the_test_split_is_large_long_and_shows_every_feature(unseen: list[Sentence]) -> None:
    assert len({source(s) for s in unseen}) == len(unseen) == 2_000
    assert sum(len(s.source) for s in unseen) / len(unseen) >= 8
    for feature in en_es.FEATURES:
        assert sum(feature in s.features for s in unseen) >= 0.05 * len(unseen), feature


def test_sentences_have_3_to_40_words_and_most_are_short(train: list[Sentence]) -> None:
    lengths = [len(s.source) for s in train]
    assert min(lengths) >= 3 and 30 <= max(lengths) <= 40
    assert 8 <= sum(lengths) / len(lengths) <= 10
    assert sum(length > 20 for length in lengths) < 0.05 * len(lengths)


def test_valid_and_train_share_no_sentence(train: list[Sentence]) -> None:
    valid = [pair.source for pair in pairs("en-es", "valid")]
    assert len(set(valid)) == len(valid) == 1_000
    assert {source(s) for s in train}.isdisjoint(valid)


def test_shapes_of_the_shapes_split_are_not_in_training(train: list[Sentence], unseen: list[Sentence]) -> None:
    new = list(islice(en_es.derivations("shapes"), 1_000))
    assert len({source(s) for s in new}) == 1_000
    signatures = {s.signature for s in new}
    assert len(signatures) >= 7
    assert signatures.isdisjoint(s.signature for s in (*train, *unseen))


def test_training_could_go_on_for_millions_of_distinct_sentences(train: list[Sentence]) -> None:
    """Counted on one plain shape, `determiner noun verb determiner noun`; train has all of it but valid's 1 in 25."""
    tables = choices(everything=False)
    frames = sum(len(tables.subjects[verb]) * len(tables.objects[verb]) for verb in tables.subjects)
    determiners = len({d.english for d in (*SINGULAR, *PLURAL)})
    assert determiners >= 15 and frames * 5 * 5 > 10_000_000  # at least five determiners fit any one noun
    some = train[:50_000]
    assert len({source(s) for s in some}) > 0.95 * len(some)


def test_the_same_seed_gives_the_same_sentences_in_another_process() -> None:
    script = (
        "from regard.data.builtin import pairs; import sys\n"
        "for split in ('train', 'valid', 'test', 'shapes'):\n"
        "    for p in pairs('en-es', split, 20, seed=3): print(p.source, p.target, p.alignment, sorted(p.features))\n"
        "assert 'torch' not in sys.modules"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": h}, capture_output=True, text=True, check=True
        ).stdout
        for h in ("1", "2")
    ]
    assert runs[0] == runs[1] and runs[0].count("\n") == 80
    assert list(pairs("en-es", "train", 5, seed=3)) != list(pairs("en-es", "train", 5, seed=4))


# the links


def test_every_word_is_linked_but_the_stated_exceptions(train: list[Sentence]) -> None:
    for s in train[:20_000]:
        assert len(set(s.links)) == len(s.links)
        assert all(i < len(s.source) and j < len(s.target) for i, j in s.links)
        assert {i for i, _ in s.links} == set(range(len(s.source))), source(s)
        unlinked = [s.target[j] for j in set(range(len(s.target))) - {j for _, j in s.links}]
        assert set(unlinked) <= {"¿", "a"}


def test_content_words_are_linked_to_their_translations(train: list[Sentence]) -> None:
    words = lexicon()
    spanish = {en: es for noun in words.nouns for en, es in zip(noun.english, noun.spanish, strict=True)}
    forms = {a.name: {form for gender in a.spanish for form in gender} for a in words.adjectives}
    verbs = {
        en: {verb.infinitive, *(form for row in verb.spanish for form in row)}
        for verb in words.verbs for row in verb.english for en in row
    }  # fmt: skip
    for s in train[:20_000]:
        for i, j in s.links:
            en, es = s.source[i], s.target[j]
            assert spanish.get(en, es) == es
            assert es in forms.get(en, {es}) and es in verbs.get(en, {es})
