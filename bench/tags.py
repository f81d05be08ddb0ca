"""Tag transfer on the built-in corpus: random tags, and where they are after translation, against gold alignments.

    python -m bench.tags RUN [--count 2000]

RUN is a run of the recipe en-es. Every sentence has one to three elements around random words, some nested. All outputs
are parsed by a strict XML parser. An element is right if it contains exactly the words that the gold alignment links
with its own; only sentences whose translation is the reference have a gold alignment. "gold" is the same transfer by
the gold links: what one run of words for each element can reach.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable

from lxml import etree

import regard
from regard.data.builtin import Pair, pairs
from regard.tasks.documents import translate_documents
from regard.text.documents import prepare

TAGS = ("b", "i", "em", "span", "a")


def tagged(pair: Pair, draw: random.Random) -> tuple[str, dict[str, set[int]]]:
    """The source with random elements, and the source words of each by its number."""
    words = pair.source.split()
    opening: list[str] = [""] * len(words)
    closing: list[str] = [""] * len(words)
    covers: dict[str, set[int]] = {}
    free = [(0, len(words))]
    for number in range(draw.randint(1, 3)):
        start, stop = draw.choice(free)
        first = draw.randrange(start, stop)
        last = draw.randrange(first, min(stop, first + 3))
        tag, name = draw.choice(TAGS), str(number)
        opening[first] += f'<{tag} n="{name}">'
        closing[last] = f"</{tag}>" + closing[last]
        covers[name] = set(range(first, last + 1))
        free = [(first, last + 1), *((a, b) for a, b in ((start, first), (last + 1, stop)) if a < b)]
    text = " ".join(o + word + c for o, word, c in zip(opening, words, closing, strict=True))
    return text, covers


def inside(root: etree._Element) -> dict[str, set[int]]:
    """The numbers of the words inside each element."""
    found: dict[str, set[int]] = {}

    def visit(element: etree._Element, count: int) -> int:
        start = count
        count += len((element.text or "").split())
        for child in element:
            count = visit(child, count) + len((child.tail or "").split())
        found[element.get("n", "")] = set(range(start, count))
        return count

    visit(root, 0)
    return found


def right(output: str, covers: dict[str, set[int]], links: Iterable[tuple[int, int]]) -> int:
    """How many elements of an output contain exactly the words linked with theirs."""
    placed = inside(etree.fromstring(f"<r>{output}</r>"))
    return sum(placed[name] == {j for i, j in links if i in words} for name, words in covers.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--count", type=int, default=2000)
    given = parser.parse_args()
    model, draw = regard.load(given.run), random.Random(1)
    chosen = [*pairs("en-es", "test"), *pairs("en-es", "valid")][: given.count]
    sources = [tagged(pair, draw) for pair in chosen]
    found = translate_documents(model.translator(), model.word_links, [text for text, _ in sources], format="html")
    well_formed = elements = correct = gold = exact = 0
    for pair, (text, covers), translated in zip(chosen, sources, found, strict=True):
        etree.fromstring(f"<r>{translated.texts[0]}</r>")
        well_formed += 1
        if translated.answers[0].texts[0] != pair.target:
            continue
        exact += 1
        elements += len(covers)
        correct += right(translated.texts[0], covers, pair.alignment)
        gold += right(prepare(text, "html").assemble([pair.target], [pair.alignment]), covers, pair.alignment)
    print(f"{well_formed} of {len(chosen)} outputs well-formed; {exact} translations equal the reference")
    print(f"{elements} elements: {100 * correct / elements:.2f} % right, by gold links {100 * gold / elements:.2f} %")


if __name__ == "__main__":
    main()
