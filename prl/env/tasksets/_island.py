"""A small encyclopaedia of an invented island: nobody can know it by heart, so tools are needed.

Generated from a fixed seed: the same articles and questions everywhere, without a file or a network.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from dataclasses import dataclass

SEED = 20260101
SYLLABLES = re.findall(
    r"\w+",
    """
    bal dor eth fen gar hal ist jor kel lum mor nav ost pel quor ran sel tur ulm ven wex yar zan
""",
)
CRAFTS = ["glass", "rope", "clocks", "paper", "bells", "carpets", "cheese", "saddles", "lanterns", "ink"]
TRADES = ["navigator", "botanist", "composer", "engineer", "physician", "painter", "printer", "geometer"]
TOWNS, PEOPLE = 12, 18


@dataclass(frozen=True)
class Article:
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    prompt: str
    answer: str
    hops: int
    """Articles that one must read to know."""


@dataclass(frozen=True)
class Encyclopaedia:
    articles: dict[str, Article]
    questions: list[Question]

    def search(self, query: str, limit: int = 5) -> list[str]:
        """Titles by BM25 of query and article, best first; only those that share a word."""
        index = _index(self)
        scores: Counter[str] = Counter()
        for word in _words(query):
            found = index.postings.get(word, {})
            rarity = math.log(1 + (len(index.lengths) - len(found) + 0.5) / (len(found) + 0.5))
            for title, count in found.items():
                length = 0.25 + 0.75 * index.lengths[title] / index.mean_length
                scores[title] += rarity * count * 2.2 / (count + 1.2 * length)  # type: ignore[assignment]
        return [title for title, _ in sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:limit]]


@functools.cache
def encyclopaedia() -> Encyclopaedia:
    """All articles and questions."""
    rng = random.Random(SEED)
    names = iter(_names(rng, 2 * TOWNS + 2 * PEOPLE))
    towns = [next(names) for _ in range(TOWNS)]
    rivers = [next(names) for _ in range(TOWNS)]
    people = [f"{next(names)} {next(names)}" for _ in range(PEOPLE)]
    articles, questions = [], []
    facts = {}
    for person in people:
        facts[person] = (rng.choice(towns), rng.choice(TRADES), rng.randint(1502, 1790))
    for town, river in zip(towns, rivers, strict=True):
        founder = rng.choice([person for person in people if facts[person][0] != town])
        craft, year = rng.choice(CRAFTS), rng.randint(1510, 1830)
        mayor = rng.choice([person for person in people if person != founder])
        text = (
            f"{town} is a town on the river {river}. It was founded in {year} by {founder}. "
            f"It is known for its {craft}. Its first mayor was {mayor}."
        )
        articles.append(Article(town, text))
        home, trade, born = facts[founder]
        questions += [
            Question(f"On which river is the town of {town}?", river, 1),
            Question(f"In which town was the founder of {town} born?", home, 2),
            Question(f"What was the profession of the first mayor of {town}?", facts[mayor][1], 2),
            Question(f"In which year was the founder of {town} born?", str(born), 2),
        ]
    for person, (home, trade, born) in facts.items():
        articles.append(Article(person, f"{person}, born in {born} in {home}, was a {trade}."))
        river = rivers[towns.index(home)]
        questions.append(Question(f"On which river was {person} born?", river, 2))
    rng.shuffle(questions)
    return Encyclopaedia({article.title: article for article in articles}, questions)


@dataclass(frozen=True)
class _Index:
    postings: dict[str, Counter[str]]
    lengths: dict[str, int]
    mean_length: float


@functools.cache
def _index_of(articles: tuple[Article, ...]) -> _Index:
    postings: dict[str, Counter[str]] = {}
    lengths = {}
    for article in articles:
        words = _words(f"{article.title} {article.text}")
        lengths[article.title] = len(words)
        for word in words:
            postings.setdefault(word, Counter())[article.title] += 1
    return _Index(postings, lengths, sum(lengths.values()) / len(lengths))


def _index(book: Encyclopaedia) -> _Index:
    return _index_of(tuple(book.articles.values()))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _names(rng: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault("".join(rng.sample(SYLLABLES, 2)).capitalize())
    return list(found)
