"""Columns of CSV, TSV and JSON lines: quoted fields are unquoted, and quotation marks of a text are kept."""

from __future__ import annotations

import csv
import io
import random

import pytest

from regard.data.corpora import detected_layouts, held_out, read_pairs
from regard.errors import UserError
from regard.recipes.schema import Corpus, DataSettings

SPEECH = [('He said "no".', 'Er sagte "nein".'), ("Yes, sir.", "Ja, Herr."), ("A plain one", "Ein einfacher")]


def pairs(folder, name, content, **settings):
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    data = DataSettings(folder=str(folder), pairs=name, **settings)
    return list(read_pairs(data, data))


def detected(folder, name, **settings):
    return [
        line.removeprefix(f"{folder}/")
        for line in detected_layouts(DataSettings(folder=str(folder), pairs=name, **settings))
    ]


def written(rows, **how):
    out = io.StringIO()
    csv.writer(out, **{"delimiter": "\t", "lineterminator": "\n", **how}).writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quoted_tsv_is_unquoted(tmp_path, quoting, end):
    many = [*SPEECH, ("two\nlines", "zwei\nZeilen"), ("a\ttab", "ein\tTab"), *SPEECH]
    assert pairs(tmp_path, "a.tsv", written(many, quoting=quoting, lineterminator=end)) == many
    assert detected(tmp_path, "a.tsv") == ["a.tsv: quoted fields"]


def test_tsv_of_a_spreadsheet_quotes_fields_with_commas(tmp_path):
    content = 'de\ten\nja\tyes\n"Ja, ja"\t"Yes, yes"\n"Er sagte ""ja"""\t"He said ""yes"""\n'
    assert pairs(tmp_path, "a.tsv", content)[1:] == [("Ja, ja", "Yes, yes"), ('Er sagte "ja"', 'He said "yes"')]
    assert detected(tmp_path, "a.tsv") == ["a.tsv: header de, en; quoted fields"]


UNQUOTED = [
    '"Yes."\t"Ja."\nHe came.\tEr kam.\n',  # whole sentences in quotation marks among others
    '"I am here," he said.\t"Ich bin hier", sagte er.\nx\ty\n',
    'He said "yes".\tEr sagte "ja".\n',
    '"This is the first part.\tDas ist der erste Teil.\nAnd this the second."\tUnd das der zweite.\n',  # over two lines
    '"One.\t"Eins.\nTwo."\tZwei."\n',
    '""quoted twice""\t"x"\n"b"\t"c"\n',
    '"Yes, sir."\tJa, Herr.\n"No, sir."\t"Nein, Herr."\nWell, no.\tNun, nein.\n',
    '5" disk\tDiskette\n',
    '"Yes."\tJa, gut.\n"say ""x"" now"\tsage x\n',  # no program quotes the first field and not the second
    '"\tx\n"\ty\n',
]


@pytest.mark.parametrize("content", UNQUOTED)
def test_quotation_marks_of_a_text_are_kept(tmp_path, content):
    expected = [tuple(line.split("\t")) for line in content.splitlines()]
    assert pairs(tmp_path, "a.tsv", content) == expected
    assert detected(tmp_path, "a.tsv") == []


def test_one_improper_quotation_mark_means_unquoted(tmp_path):
    quoted = written(SPEECH * 500, quoting=csv.QUOTE_ALL)
    content = quoted + 'He said "no".\tEr sagte "nein".\n'
    assert pairs(tmp_path, "a.tsv", content)[0] == ('"He said ""no""."', '"Er sagte ""nein""."')


def test_quoting_that_starts_late_is_detected(tmp_path):
    content = written([("plain", "schlicht")] * 5000 + SPEECH)
    assert pairs(tmp_path, "a.tsv", content)[-3:] == SPEECH


def test_settings_override_detection(tmp_path):
    assert pairs(tmp_path, "a.tsv", '"a"\t"b"\n"c"\t"d"\n', quoted=False)[0] == ('"a"', '"b"')
    assert pairs(tmp_path, "b.tsv", '"Yes."\tJa.\nx\ty\n', quoted=True)[0] == ("Yes.", "Ja.")
    with pytest.raises(UserError, match=r"c\.tsv, line 2: not properly quoted .*data\.quoted = false"):
        pairs(tmp_path, "c.tsv", 'a\tb\n"I" said\tx\n', quoted=True)
    with pytest.raises(UserError, match=r"d\.tsv, line 2: not properly quoted"):
        pairs(tmp_path, "d.tsv", 'a\tb\n"never closed\tx\ny\tz\n', quoted=True)


@pytest.mark.parametrize("seed", range(20))
def test_files_written_by_the_csv_module_are_read_correctly(tmp_path, seed):
    draw = random.Random(seed)
    signs = ["a", "b ", '"', ",", ";", "\n", "\t", "ß", "'", " "]
    many = [tuple("x" + "".join(draw.choices(signs, k=draw.randint(0, 6))) for _ in range(2)) for _ in range(40)]
    for name, how in {
        "a.csv": {"delimiter": ","},
        "b.csv": {"delimiter": ",", "quoting": csv.QUOTE_ALL},
        "c.tsv": {},
    }.items():
        content = written(many, **how)
        assert pairs(tmp_path, name, content, quoted=True) == many, name
    assert pairs(tmp_path, "c.tsv", written(many, quoting=csv.QUOTE_ALL)) == many


def test_csv_with_header_and_other_columns(tmp_path):
    content = '\ufeffid,en,de\r\n1,"Hello, you",Hallo\r\n2,"two\r\nlines","say ""ja"""\r\n\r\n'
    expected = [("Hallo", "Hello, you"), ('say "ja"', "two\nlines")]
    assert pairs(tmp_path, "a.csv", content, columns=["de", "en"]) == expected
    assert pairs(tmp_path, "a.csv", content, columns=[3, 2]) == expected
    assert detected(tmp_path, "a.csv", columns=["de", "en"]) == ["a.csv: header id, en, de"]
    with pytest.raises(UserError, match=r"a\.csv has no column 'fr': the first line has id, en, de"):
        pairs(tmp_path, "a.csv", content, columns=["fr", "en"])
    with pytest.raises(UserError, match=r"a\.csv has no column 4: there are 3"):
        pairs(tmp_path, "a.csv", content, columns=[1, 4])
    with pytest.raises(UserError, match=r"a\.csv, line 1: expected 2 columns, not 3.*set data\.columns"):
        pairs(tmp_path, "a.csv", content)


def test_csv_separated_by_semicolons(tmp_path):
    assert pairs(tmp_path, "a.csv", "en;de\nHello, you;Hallo\nBye;Tschüss\n") == [
        ("Hello, you", "Hallo"),
        ("Bye", "Tschüss"),
    ]
    assert detected(tmp_path, "a.csv") == ["a.csv: header en, de; separated by ;"]


@pytest.mark.parametrize("first", ["source\ttarget", "Target\tsource", "en\tde", "src\ttgt", "English\tGerman"])
def test_a_header_is_detected_by_its_names(tmp_path, first):
    content = f"{first}\none\teins\n"
    expected = ("eins", "one") if first.startswith("Target") else ("one", "eins")
    assert pairs(tmp_path, "a.tsv", content) == [expected]
    assert detected(tmp_path, "a.tsv") == [f"a.tsv: header {first.replace(chr(9), ', ')}"]
    assert len(pairs(tmp_path, "a.tsv", content, header=False)) == 2


@pytest.mark.parametrize("first", ["one\teins", "The source\tDie Quelle", "en\ten", "dog\tHund"])
def test_a_sentence_is_not_a_header(tmp_path, first):
    assert len(pairs(tmp_path, "a.tsv", f"{first}\ntwo\tzwei\n")) == 2
    assert len(pairs(tmp_path, "a.tsv", f"{first}\ntwo\tzwei\n", header=True)) == 1


def test_a_row_with_the_wrong_number_of_columns_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"a\.csv, line 4: expected 2 columns, not 3"):
        pairs(tmp_path, "a.csv", 'a,b\n"c\nc",d\ne,f,g\n')
    with pytest.raises(UserError, match=r"a\.tsv, line 1: expected 2 columns, not 1; data\.quoted = true"):
        pairs(tmp_path, "a.tsv", '"a\nb"\tc\n', quoted=False)


def test_a_huge_field(tmp_path):
    huge = "x" * 1_000_000
    assert pairs(tmp_path, "a.csv", written([(huge, "y"), ("a", '"')], delimiter=",")) == [(huge, "y"), ("a", '"')]


def test_json_lines_in_hugging_faces_layout(tmp_path):
    content = '{"id": 1, "translation": {"de": "ja", "en": "yes"}}\n{"translation": {"en": "no", "de": "nein"}}\n'
    assert pairs(tmp_path, "a.jsonl", content, columns=["de", "en"]) == [("ja", "yes"), ("nein", "no")]
    assert pairs(tmp_path, "b.jsonl", '{"de": "ja", "en": "yes"}\n', columns=["en", "de"]) == [("yes", "ja")]
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: expected .*\(or set data\.columns to 2 of its keys\)"):
        pairs(tmp_path, "a.jsonl", content)
    with pytest.raises(UserError, match=r'a\.jsonl, line 1: expected \{"fr": "\.\.\.", "en"'):
        pairs(tmp_path, "a.jsonl", content, columns=["fr", "en"])


def test_a_format_is_needed_for_other_file_names(tmp_path):
    assert pairs(tmp_path, "a.txt", "a\tb\n", format="tsv") == [("a", "b")]
    assert pairs(tmp_path, "a.dat", "a,b\n", format="csv") == [("a", "b")]
    with pytest.raises(UserError, match=r"a\.dat: the name of a file of pairs must end in"):
        pairs(tmp_path, "a.dat", "a,b\n")


def test_corpora_of_a_mix_and_held_out_files_have_their_own_settings(tmp_path):
    (tmp_path / "a.csv").write_text("de,en\nja,yes\n")
    (tmp_path / "b.tsv").write_text("x\tnein\tno\n")
    (tmp_path / "v.csv").write_text("en,de\nyes,ja\n")
    mix = [Corpus(pairs="a.csv"), Corpus(pairs="b.tsv", columns=[2, 3])]
    data = DataSettings(folder=str(tmp_path), mix=mix, columns=["de", "en"], valid=["v.csv"])
    assert [list(read_pairs(corpus, data)) for corpus in mix] == [[("ja", "yes")], [("nein", "no")]]
    assert held_out(data, "valid") == [("ja", "yes")]


def test_plain_text_in_a_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\\n\\ntwo"}\n{"text": "three"}\n{"text": " "}\n')
    (tmp_path / "a.csv").write_text('id,story\n1,"four, five"\n')
    for documents in ("line", "paragraph"):
        data = DataSettings(folder=str(tmp_path), text="a.jsonl", documents=documents)
        assert list(read_pairs(data, data)) == [("", "one\n\ntwo"), ("", "three")]
    data = DataSettings(folder=str(tmp_path), text="a.jsonl", documents="stream")
    assert "".join(text for _, text in read_pairs(data, data)) == "one\n\ntwo\nthree\n \n"
    data = DataSettings(folder=str(tmp_path), text="a.csv", columns=["story"])
    assert list(read_pairs(data, data)) == [("", "four, five")]
    data = DataSettings(folder=str(tmp_path), text="a.jsonl", format="text", documents="line")
    assert next(read_pairs(data, data))[1].startswith('{"text"')


def test_the_number_of_columns_is_checked():
    with pytest.raises(ValueError, match="columns must have 2 entries for pairs"):
        DataSettings(pairs="a.tsv", columns=["en"])
    with pytest.raises(ValueError, match="columns must have 1 entry for plain text"):
        DataSettings(text="a.csv", columns=["a", "b"])
