"""A synchronous grammar of English and Spanish, in which every sentence has one correct translation.

Where English is ambiguous, a rule decides:

- `you` is the familiar singular; `they` and every unmarked person are masculine; `his`, `her`, `their` are all `su`;
- `i` and `you` are expressed by the ending of the Spanish verb; `he`, `she`, `they` are written, because nouns have the
  same ending;
- each adjective has one copula (ser or estar), being somewhere is estar; adjectives follow their noun;
- the simple past is the preterite for events, the imperfect for states and both copulas;
- a person as direct object takes `a`; yes/no questions keep the order of a statement, others put the verb first;
- phrases with two possible attachments and different translations are not generated.

Every Spanish word is linked to the English word it translates. A dropped pronoun, `will` and a questioning `do` are
linked to the verb, `do` beside `not` to `no`. `¿` and the personal `a` are not linked (`al` is linked to the article).
"""

from collections.abc import Callable, Iterator
from random import Random
from zlib import crc32

from regard.data.builtin.clauses import ANIMATE, Clauses
from regard.data.builtin.function_words import BE, CIRCUMSTANCES, DO, HE, THIS
from regard.data.builtin.lexicon import FUTURE, PAST, PRESENT, Verb, lexicon
from regard.data.builtin.pairings import Pairing, held_out
from regard.data.builtin.phrases import Subject
from regard.data.builtin.sentence import Sentence

FEATURES = (
    "determiner", "agreement", "adjective", "tense", "negation", "question", "number", "relative", "subordinate",
    "coordination",
)  # fmt: skip
SHORTEST, LONG, LONGEST = 3, 15, 40  # English words
VALID_ONE_IN = 25


class Grammar(Clauses):
    """The rules from the question to the whole sentence."""

    # questions

    def question(self, s: Sentence, body: Callable[[], None]) -> None:
        s.features.add("question")
        s.target.append("¿")
        body()
        s.say("?", "?")

    def do(self, s: Sentence, subject: Subject, tense: int) -> int:
        """The auxiliary that opens an English question; returns its place."""
        s.source.append("will" if tense == FUTURE else "did" if tense == PAST else DO[subject.person])
        return len(s.source) - 1

    def yes_no(self, s: Sentence, inner: int = 0) -> None:
        """`does the cat sleep ?` / `¿ el gato duerme ?`"""
        s.shape.append("yes/no")
        tense = self.tense(s)
        if not inner and self.random() < 0.25:
            noun = self.pick(self.described)
            subject = Subject((noun,), (self.plural(noun),))
            adjective = self.pick(self.choices.adjectives[noun])
            s.pairings.append(Pairing("adjective", noun.name, adjective.name))
            auxiliary = len(s.source)
            s.source.append("will" if tense == FUTURE else BE[tense][subject.person])
            self.say_subject(s, subject)
            s.links.append((auxiliary, len(s.target)))
            if tense == FUTURE:
                s.links.append((len(s.source), len(s.target)))
                s.source.append("be")
            s.target.append(self.copulas[adjective.copula][tense][subject.person])
            degree = self.pick(self.adverbs["degree"]) if adjective.graded and self.random() < 0.3 else None
            self.say_adjective(s, subject, adjective, degree)
            return
        verb = self.pick(self.verbs["transitive"] if inner else self.doing)
        subject = self.subject(s, verb)
        modal = self.pick(self.verbs["modal"]) if tense == PRESENT and self.random() < 0.1 else None
        if modal:
            auxiliary = len(s.source)
            s.source.append(modal.name)
        else:
            auxiliary = self.do(s, subject, tense)
        self.say_subject(s, subject)
        j = len(s.target)
        s.links.append((auxiliary, j))
        if subject.dropped >= 0:
            s.links.append((subject.dropped, j))
        if modal:
            s.target.append(modal.spanish[PRESENT][subject.person])
            s.say(verb.name, verb.infinitive)
        else:
            s.say(verb.name, verb.spanish[tense][subject.person])
        self.complements(s, verb, inner=inner)
        self.circumstances(s, tense)

    def inverted(self, s: Sentence, verb: Verb, tense: int) -> None:
        """`... does the cat eat` / `... come el gato`: the Spanish verb stands where English has its auxiliary."""
        subject = self.subject(s, verb)
        j = len(s.target)
        s.links.append((self.do(s, subject, tense), j))
        s.target.append(verb.spanish[tense][subject.person])
        self.say_subject(s, subject)
        if subject.dropped >= 0:
            s.links.append((subject.dropped, j))
        s.links.append((len(s.source), j))
        s.source.append(verb.name)

    def wh(self, s: Sentence, inner: int = 0) -> None:
        """Questions for the subject, the object, how many, which, or a circumstance."""
        tense = self.tense(s)
        roll = 1.0 if inner else self.random()
        transitive = self.verbs["transitive"]
        if roll < 0.2:
            s.shape.append("who")
            verb = self.pick(self.personal)
            s.say("who", "quién")
            self.action(s, Subject(pronoun=HE), verb, tense)
        elif roll < 0.4:
            verb = self.pick(transitive)
            person = "person" in verb.objects and (not self.choices.things[verb] or roll < 0.3)
            s.shape.append("whom" if person else "what")
            if person:
                s.unit("who", ("a", "quién"))
            else:
                s.say("what", "qué")
            self.inverted(s, verb, tense)
        elif roll < 0.6:
            verb = self.pick(self.of_things)
            noun = self.pick(self.choices.things[verb])
            s.pairings.append(Pairing("object", verb.name, noun.name))
            s.shape.append("which")
            if noun.mass or roll < 0.5:
                plural = self.plural(noun)
                s.say("which", "qué")
            else:
                plural = 1
                s.source.append("how")
                s.links.append((len(s.source) - 1, len(s.target)))
                s.say("many", "cuántas" if noun.feminine else "cuántos")
            if noun.feminine or plural:
                s.features.add("agreement")
            s.say(noun.english[plural], noun.spanish[plural])
            self.inverted(s, verb, tense)
        elif roll < 0.68:
            s.shape.append("where is")
            subject = self.some_subject(self.described, False)
            s.say("where", "dónde")
            tense = PRESENT if tense == FUTURE else tense
            self.be(s, subject, "estar", tense)
            self.say_subject(s, subject)
        else:
            verb = self.pick(transitive if inner else self.doing)
            s.shape.append("circumstance")
            s.unit(*self.pick(CIRCUMSTANCES))
            self.inverted(s, verb, tense)
            self.complements(s, verb, inner=inner)

    # sentences

    def training_sentence(self) -> Sentence:
        """A sentence of the shapes in the training split."""
        s = Sentence()
        roll = self.random()
        if roll < 0.54:
            self.clause(s, self.tense(s), rich=True)
        elif roll < 0.63:
            self.question(s, lambda: self.yes_no(s))
        elif roll < 0.74:
            self.question(s, lambda: self.wh(s))
        elif roll < 0.84:
            self.report(s, lambda: self.clause(s, self.tense(s)), self.tense(s))
        elif roll < 0.93:
            self.adverbial(s)
        else:
            self.two_clauses(s, long=roll > 0.996)
        s.close()
        return s

    def two_clauses(self, s: Sentence, long: bool) -> None:
        """`... and ...`, `... but ...`; the rare long one opens with a report and goes on with `because`."""
        s.features.add("coordination")
        s.shape.append("2clauses")
        if long:
            self.report(s, lambda: self.clause(s, self.tense(s)), self.tense(s))
        else:
            self.clause(s, self.tense(s))
        s.join(*self.pick((("and", "y"), ("but", "pero"))))
        if long:
            self.adverbial(s, rich=False)
        else:
            self.clause(s, self.tense(s))

    def new_shape(self, which: int) -> Sentence:
        """A sentence with nesting that the training split never has; `which` selects one of the seven kinds."""
        s = Sentence()
        tense = self.tense(s)

        def statement_with_relative(depth: int) -> None:
            verb = self.pick([v for v in self.verbs["transitive"] if depth == 1 or v.objects & ANIMATE])
            subject = self.subject(s, verb)
            self.say_subject(s, subject)
            self.action(s, subject, verb, self.tense(s), inner=depth)

        def three_subjects() -> None:
            verb = self.pick(self.doing)
            nouns = [self.pick(self.choices.subjects[verb]) for _ in range(3)]
            s.pairings += (Pairing("subject", noun.name, verb.name) for noun in nouns)
            subject = Subject(nouns, [self.plural(noun) for noun in nouns])
            self.say_subject(s, subject)
            self.action(s, subject, verb, tense)

        makers: tuple[Callable[[], None], ...] = (
            lambda: self.report(s, lambda: statement_with_relative(1), tense),
            three_subjects,
            lambda: self.question(s, lambda: self.yes_no(s, inner=1)),
            lambda: statement_with_relative(2),
            lambda: self.report(s, lambda: self.report(s, lambda: self.clause(s, tense), self.tense(s)), tense),
            lambda: self.report(s, lambda: self.adverbial(s, rich=False), tense),
            lambda: self.question(s, lambda: self.wh(s, inner=1)),
        )
        makers[which % len(makers)]()
        s.close()
        return s

    def example(self) -> Sentence:
        """`this cat is very large` / `este gato es muy grande`."""
        words = lexicon()
        cat = next(n for n in words.nouns if n.name == "cat")
        large = next(a for a in words.adjectives if a.name == "large")
        s = Sentence()
        subject = Subject((cat,), (0,))
        s.pairings.append(Pairing("adjective", "cat", "large"))
        self.say_noun(s, cat, 0, THIS)
        self.be(s, subject, large.copula, PRESENT)
        self.say_adjective(s, subject, large, self.very)
        return s


# splits

COUNTS = {"train": 200_000, "valid": 1_000, "test": 2_000, "shapes": 1_000}


def derivations(split: str, seed: int = 0) -> Iterator[Sentence]:
    """An endless stream of the split's sentences with their derivations."""
    rng = Random(f"en-es {split} {seed}")
    sentences = {"train": _train, "valid": _valid, "test": _test, "shapes": _shapes}[split](rng)
    fitting = (s for s in sentences if _fits(s))
    return fitting if split == "train" else _distinct(fitting)


def _fits(s: Sentence) -> bool:
    """Whether a sentence is within the limits; of long sentences, which are too frequent, one in four is kept."""
    length = len(s.source)
    return SHORTEST <= length <= LONG or (LONG < length <= LONGEST and crc32(" ".join(s.target).encode()) % 4 == 0)


def _belongs_to_valid(s: Sentence) -> bool:
    return crc32(" ".join(s.source).encode()) % VALID_ONE_IN == 0


def _train(rng: Random) -> Iterator[Sentence]:
    grammar = Grammar(rng, everything=False)
    while True:
        s = grammar.training_sentence()
        if not _belongs_to_valid(s):
            yield s


def _valid(rng: Random) -> Iterator[Sentence]:
    grammar = Grammar(rng, everything=False)
    while True:
        s = grammar.training_sentence()
        if _belongs_to_valid(s):
            yield s


def _test(rng: Random) -> Iterator[Sentence]:
    """The example, then sentences like those of training, kept if a random one of their pairings is held out.

    Keeping every sentence with a held-out pairing would favour long sentences.
    """
    grammar = Grammar(rng, everything=True)
    yield grammar.example()
    while True:
        s = grammar.training_sentence()
        if s.pairings and held_out(*grammar.pick(s.pairings)):
            yield s


def _shapes(rng: Random) -> Iterator[Sentence]:
    grammar = Grammar(rng, everything=False)
    which = 0
    while True:
        yield grammar.new_shape(which)
        which += 1


def _distinct(sentences: Iterator[Sentence]) -> Iterator[Sentence]:
    seen = set()
    for s in sentences:
        text = " ".join(s.source)
        if text not in seen:
            seen.add(text)
            yield s
