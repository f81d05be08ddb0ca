"""Verbs and clauses of the en-es grammar."""

from collections.abc import Callable

from regard.data.builtin.function_words import BE, DO, DRAWN_PRONOUNS, PREPOSITIONS, WHEN_CLAUSES
from regard.data.builtin.lexicon import FUTURE, PAST, PRESENT, THEY, Adjective, Adverb, Noun, Verb
from regard.data.builtin.pairings import Pairing
from regard.data.builtin.phrases import Phrases, Subject
from regard.data.builtin.sentence import Sentence

ANIMATE = {"person", "animal"}


class Clauses(Phrases):
    """The rules from the verb to the whole statement."""

    # verbs

    def verb_group(self, s: Sentence, subject: Subject, verb: Verb, tense: int, plain: bool = False) -> None:
        """The verb in a statement: affirmed, denied, with an adverb of frequency, or under `can` or `must`."""
        roll = self.random() if not plain else 1.0
        if tense == PRESENT and 0.2 < roll < 0.27:
            modal = self.pick(self.verbs["modal"])
            j = len(s.target)
            s.say(modal.name, modal.spanish[PRESENT][subject.person])
            if subject.dropped >= 0:
                s.links.append((subject.dropped, j))
            s.say(verb.name, verb.infinitive)
            return
        negated = roll < 0.12
        will = tense == FUTURE
        auxiliary = "will" if will else ("did" if tense == PAST else DO[subject.person]) if negated else ""
        i = len(s.source)
        if auxiliary:
            s.source.append(auxiliary)
        if negated:
            self.deny(s)
            if not will:
                s.links.append((i, len(s.target) - 1))
        elif roll < 0.2:
            self.frequency(s)
        j = len(s.target)
        if will:
            s.links.append((i, j))
        if subject.dropped >= 0:
            s.links.append((subject.dropped, j))
        s.say(verb.name if auxiliary else verb.english[tense][subject.person], verb.spanish[tense][subject.person])

    def deny(self, s: Sentence) -> None:
        s.say("not", "no")
        s.features.add("negation")

    def frequency(self, s: Sentence) -> None:
        adverb = self.pick(self.adverbs["frequency"])
        s.unit(adverb.name, adverb.spanish)
        if adverb.name == "never":
            s.features.add("negation")

    def complements(self, s: Sentence, verb: Verb, rich: bool = False, inner: int = 0) -> None:
        """The complements of a verb: an object, an object and a receiver, a destination."""
        if verb.frame in ("transitive", "giving"):
            self.object(s, verb, rich and verb.frame == "transitive", inner)
            if verb.frame == "giving":
                s.say("to", "a")
                receiver = self.pick(self.nouns["person"])
                self.noun_phrase(s, receiver, self.plural(receiver))
        elif verb.frame == "motion" and self.random() < 0.7:
            s.say("to", "a")
            place = self.pick(self.nouns["place"])
            self.noun_phrase(s, place, 0)

    def object(self, s: Sentence, verb: Verb, rich: bool = False, inner: int = 0) -> None:
        nouns = self.choices.objects[verb]
        if inner > 1:  # the noun will be the subject of a verb with an object of its own
            nouns = [noun for noun in nouns if noun.kinds & ANIMATE]
        noun = self.pick(nouns)
        plural = self.plural(noun)
        s.pairings.append(Pairing("object", verb.name, noun.name))
        if "person" in noun.kinds:
            s.target.append("a")
        roll = self.random() if rich else 1.0
        if roll < 0.08 and (other := self.pick(self.choices.things[verb] or [noun])) is not noun:
            if s.target[-1] == "a":  # each person would need an `a` of its own: keep to one
                self.noun_phrase(s, noun, plural)
                return
            s.pairings.append(Pairing("object", verb.name, other.name))
            self.coordinated(s, (noun, other), (plural, self.plural(other)), "and" if roll < 0.05 else "or")
            return
        self.noun_phrase(s, noun, plural, inner or (1 if 0.08 <= roll < 0.22 else 0), owned=rich)

    def circumstances(self, s: Sentence, tense: int) -> None:
        """Manner, place, time, in this order in both languages."""
        random = self.random
        if random() < 0.1:
            adverb = self.pick(self.adverbs["manner"])
            s.unit(adverb.name, adverb.spanish)
        if random() < 0.17:
            self.somewhere(s)
        if random() < 0.14:
            adverb = self.pick(self.times[tense])
            s.unit(adverb.name, adverb.spanish)

    def somewhere(self, s: Sentence) -> None:
        roll = self.random()
        if roll < 0.2:
            adverb = self.pick(self.adverbs["place"])
            s.unit(adverb.name, adverb.spanish)
            return
        kind = "place" if roll < 0.55 else "landmark" if roll < 0.62 else "person" if roll < 0.8 else "object"
        s.unit(*self.pick(PREPOSITIONS[kind]))
        noun = self.pick(self.nouns[kind])
        self.noun_phrase(s, noun, self.plural(noun) if kind == "person" else 0)

    # clauses, after their subject

    def action(
        self, s: Sentence, subject: Subject, verb: Verb, tense: int, rich: bool = False, inner: int = 0,
        plain: bool = False,
    ) -> None:  # fmt: skip
        self.verb_group(s, subject, verb, tense, plain)
        self.complements(s, verb, rich, inner)
        if not plain:
            self.circumstances(s, tense)

    def description(self, s: Sentence, subject: Subject, tense: int, plain: bool = False) -> None:
        """`is very large`: the adjective agrees with the subject and decides between ser and estar."""
        one = len(subject.nouns) == 1
        adjective = self.pick(self.choices.adjectives[subject.nouns[0]] if one else self.for_people)
        if one:
            s.pairings.append(Pairing("adjective", subject.nouns[0].name, adjective.name))
        roll = self.random()
        self.be(s, subject, adjective.copula, tense, negated=not plain and roll < 0.12)
        degree = self.pick(self.adverbs["degree"]) if adjective.graded and roll > 0.65 else None
        self.say_adjective(s, subject, adjective, degree)
        if one and not plain and self.random() < 0.12:
            other = self.pick(self.choices.adjectives[subject.nouns[0]])
            if other.copula == adjective.copula and other is not adjective:
                s.pairings.append(Pairing("adjective", subject.nouns[0].name, other.name))
                s.features.add("coordination")
                s.join("and", "y")
                self.say_adjective(s, subject, other)

    def say_adjective(self, s: Sentence, subject: Subject, adjective: Adjective, degree: Adverb | None = None) -> None:
        plural = subject.person == THEY
        if degree:
            s.unit(degree.name, degree.spanish)
        s.say(adjective.name, adjective.spanish[subject.feminine][plural])
        if subject.feminine or plural:
            s.features.add("agreement")

    def be(self, s: Sentence, subject: Subject, copula: str, tense: int, negated: bool = False) -> None:
        """`is not` / `no es`, `will not be` / `no será`."""
        person = subject.person
        i = len(s.source)
        s.source.append("will" if tense == FUTURE else BE[tense][person])
        if negated:
            self.deny(s)
        j = len(s.target)
        s.links.append((i, j))
        if tense == FUTURE:
            s.links.append((len(s.source), j))
            s.source.append("be")
        if subject.dropped >= 0:
            s.links.append((subject.dropped, j))
        s.target.append(self.copulas[copula][tense][person])

    def infinitive(self, s: Sentence, subject: Subject, verb: Verb, tense: int) -> None:
        """`wants to eat` / `quiere comer`; the subject must make sense with both verbs."""
        self.verb_group(s, subject, verb, tense)
        if subject.pronoun:
            done = self.pick(self.personal)
        else:
            done = self.pick(self.choices.actions[subject.nouns[0]])
            s.pairings.append(Pairing("subject", subject.nouns[0].name, done.name))
        s.shape.append("infinitive")
        i = len(s.source)
        s.source.append("to")
        for word in verb.before_infinitive:
            s.links.append((i, len(s.target)))
            s.target.append(word)
        s.links.append((i, len(s.target)))
        s.say(done.name, done.infinitive)
        self.complements(s, done)
        self.circumstances(s, tense)

    # whole clauses

    def relative_clause(self, s: Sentence, noun: Noun, plural: int, depth: int) -> None:
        """`who`/`that` is `que`. The noun is the clause's subject, or its object (not a person, who would need `a`)."""
        s.features.add("relative")
        s.shape.append("relative(")
        human = "person" in noun.kinds
        s.say("who" if human else "that", "que")
        tense = self.tense(s)
        roll = self.random()
        if depth > 1:  # the inner relative clause needs an object to stand after
            verb = self.pick([v for v in self.choices.actions[noun] if v.frame == "transitive"])
            self.action(s, self.known_subject(s, noun, plural, verb), verb, tense, inner=depth - 1, plain=True)
        elif not human and roll < 0.45 and self.choices.suffered[noun]:
            verb = self.pick(self.choices.suffered[noun])
            s.pairings.append(Pairing("object", verb.name, noun.name))
            subject = self.subject(s, verb)
            self.say_subject(s, subject)
            self.verb_group(s, subject, verb, tense, plain=True)
        elif roll > 0.8 or not self.choices.actions[noun]:
            self.description(s, Subject((noun,), (plural,)), tense, plain=True)
        else:
            verb = self.pick(self.choices.actions[noun])
            self.action(s, self.known_subject(s, noun, plural, verb), verb, tense, plain=True)
        s.shape.append(")")

    def clause(self, s: Sentence, tense: int, rich: bool = False) -> None:
        """A statement: doing something (perhaps two things), wanting to, being like this, being somewhere."""
        roll = self.random()
        if roll < 0.7:
            verb = self.pick(self.doing)
            subject = self.subject(s, verb, rich)
            self.say_subject(s, subject)
            if rich and roll < 0.07:
                self.two_actions(s, subject, verb, tense)
            else:
                self.action(s, subject, verb, tense, rich)
        elif roll < 0.78:
            verb = self.pick(self.verbs["controlling"])
            subject = self.subject(s, verb)
            self.say_subject(s, subject)
            self.infinitive(s, subject, verb, tense)
        else:
            if self.random() < 0.2:
                subject = Subject(pronoun=self.pick(DRAWN_PRONOUNS))
            else:
                subject = self.some_subject(self.described, False)
            if rich and subject.nouns and self.random() < 0.1:
                subject.relative = 1
            self.say_subject(s, subject)
            if roll < 0.95:
                self.description(s, subject, tense)
            else:
                self.be(s, subject, "estar", tense, negated=self.random() < 0.12)
                self.somewhere(s)

    def two_actions(self, s: Sentence, subject: Subject, verb: Verb, tense: int) -> None:
        """`eats the bread and sleeps`. The first object is simple, so that the second verb has one possible subject."""
        self.verb_group(s, subject, verb, tense, plain=True)
        self.complements(s, verb)
        s.features.add("coordination")
        s.shape.append("2verbs")
        s.join("and", "y")
        subject.dropped = -1
        if subject.pronoun:
            second = self.pick(self.personal)
        else:
            shared = [v for v in self.choices.actions[subject.nouns[0]] if self.all_fit(subject, v)]
            second = self.pick(shared)
            s.pairings += (Pairing("subject", noun.name, second.name) for noun in subject.nouns)
        self.verb_group(s, subject, second, tense, plain=True)
        self.complements(s, second)

    def all_fit(self, subject: Subject, verb: Verb) -> bool:
        return all(noun in self.choices.subjects[verb] for noun in subject.nouns[1:])

    def report(self, s: Sentence, said: Callable[[], None], tense: int) -> None:
        """`she says that ...`: never denied, which would call for the subjunctive."""
        verb = self.pick(self.verbs["reporting"])
        subject = self.subject(s, verb)
        self.say_subject(s, subject)
        self.verb_group(s, subject, verb, tense, plain=True)
        s.features.add("subordinate")
        s.shape.append("that(")
        s.say("that", "que")
        said()
        s.shape.append(")")

    def circumstance_tenses(self, s: Sentence, word: str) -> tuple[int, int]:
        """Tenses of the main and the dependent clause. `if` and `when` about the future would need other moods."""
        if word == "if":
            return self.pick((PRESENT, FUTURE)), PRESENT
        if word == "when":
            tense = self.pick((PRESENT, PAST))
            return tense, tense
        return self.tense(s), self.tense(s)

    def adverbial(self, s: Sentence, rich: bool = True) -> None:
        """`... because ...`, or the other way round with a comma."""
        word, palabra = self.pick(WHEN_CLAUSES)
        main, dependent = self.circumstance_tenses(s, word)
        if main or dependent:
            s.features.add("tense")
        s.features.add("subordinate")
        if self.random() < 0.3:
            s.shape.append("fronted(")
            s.say(word, palabra)
            self.clause(s, dependent)
            s.shape.append(")")
            s.say(",", ",")
            self.clause(s, main)
        else:
            self.clause(s, main, rich)
            s.shape.append("adverbial(")
            s.say(word, palabra)
            self.clause(s, dependent)
            s.shape.append(")")
