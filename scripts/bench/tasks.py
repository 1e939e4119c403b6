"""Prompts whose answers are known: RULER's generated tasks (arXiv 2404.06654), and documents.

Each prompt is written before any question is known, and has one question or several. RULER's words,
lengths and templates are smaller here, for small models. RULER takes some lists in any order (`vt`,
`cwe`, `fwe`, queries). Here the text fixes the order: that of the chain, of the question, or of the
frequencies, which all differ. So an answer has one right wording.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

WORDS = (
    "apple river candle window garden silver mountain letter bridge forest copper lantern market"
    " orange pencil rocket saddle timber violin wagon yellow zebra anchor basket".split()
)
HEAD = "<|im_start|>system\nYou answer questions about texts.<|im_end|>\n<|im_start|>user\n"
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
FILLERS = (
    "The building was renovated some years ago and has three floors with large windows.",
    "Visitors sign the book at the desk and wait until somebody comes to fetch them.",
    "The canteen opens at noon, and on Fridays there is soup with bread for everyone.",
    "Deliveries are taken at the back door, where a bell must be rung twice.",
    "A shuttle bus goes to the station every half hour until late in the evening.",
)
CITIES = "Oslo Lima Cairo Quito Turin Perth Dakar Hanoi Lagos Delhi Osaka Milan Sofia Tunis".split()


@dataclass(frozen=True)
class Sample:
    """A prompt's text, and the questions with their answers."""

    text: str
    questions: list[tuple[str, str]]

    @property
    def parts(self) -> list[str]:
        """The beginning, and the documents behind it. A text without documents is cut into four
        parts."""
        _, body = self.text.split(HEAD)
        documents = body.split("\n\n")[1:]
        if documents:
            return [HEAD, *(f"\n\n{document}" for document in documents)]
        words = body.split(" ")
        size = math.ceil(len(words) / 4)
        quarters = [" ".join(words[at : at + size]) for at in range(0, len(words), size)]
        return [HEAD, quarters[0], *(f" {quarter}" for quarter in quarters[1:])]


def _question(question: str, beginning: str, answer: str) -> tuple[str, str]:
    """A question and its answer. The answer's `beginning` belongs to the question: only what
    follows is measured."""
    return f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n{beginning}", f" {answer}."


def _hidden(rng: random.Random, needles: list[str], size: int) -> str:
    lines = [rng.choice(NOISE) for _ in range(size)]
    for needle in needles:
        lines.insert(rng.randrange(1, len(lines)), needle)
    return HEAD + " ".join(lines)


def _needles(rng: random.Random, num: int, size: int) -> tuple[str, dict[str, str]]:
    values = {word: str(rng.randrange(1000, 10_000)) for word in rng.sample(WORDS, num)}
    needles = [f"The special magic number for {w} is: {value}." for w, value in values.items()]
    return _hidden(rng, needles, size), values


def _number_of(word: str, value: str) -> tuple[str, str]:
    question = f"What is the special magic number for {word} mentioned in the text?"
    return _question(question, f"The special magic number for {word} is:", value)


def niah_single(rng: random.Random, size: int) -> Sample:
    text, values = _needles(rng, 1, size)
    return Sample(text, [_number_of(*item) for item in values.items()])


def niah_multikey(rng: random.Random, size: int) -> Sample:
    text, values = _needles(rng, 4, size)
    return Sample(text, [_number_of(*item) for item in list(values.items())[:2]])


def niah_multiquery(rng: random.Random, size: int) -> Sample:
    text, values = _needles(rng, 4, size)
    pairs = list(values.items())[1:3]
    names = " and ".join(name for name, _ in pairs)
    question = f"What are the special magic numbers for {names} mentioned in the text?"
    beginning = f"The special magic numbers for {names} are:"
    answer = " and ".join(value for _, value in pairs)
    return Sample(text, [_question(question, beginning, answer)])


def vt(rng: random.Random, size: int) -> Sample:
    names = ["".join(rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 3)) for _ in range(6)]
    lines = []
    values = [str(rng.randrange(10_000, 100_000)) for _ in range(2)]
    for value, chain in zip(values, (names[:3], names[3:]), strict=True):
        lines.append(f"VAR {chain[0]} = {value}.")
        lines += [f"VAR {b} = VAR {a}." for a, b in pairwise(chain)]
    text = [rng.choice(NOISE) for _ in range(size)]
    for place, line in zip(sorted(rng.sample(range(size), len(lines))), lines, strict=True):
        text[place] += f" {line}"
    question = f"Find all variables that are assigned the value {values[0]} in the text above."
    beginning = f"The variables that are assigned the value {values[0]} are:"
    answer = ", ".join(names[:3])
    return Sample(HEAD + " ".join(text), [_question(question, beginning, answer)])


def cwe(rng: random.Random, size: int) -> Sample:
    words = rng.sample(WORDS, 15)
    frequencies = (9, 7, 5, *(1 for _ in words[3:]))
    text: list[str] = []
    for word, frequency in zip(words, frequencies, strict=True):
        text += [word] * (frequency * size // 20)
    rng.shuffle(text)
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(text, 1))
    question = "What are the 3 most common words in the above list, the most common first?"
    answer = _question(question, "The 3 most common words are:", ", ".join(words[:3]))
    return Sample(HEAD + numbered, [answer])


def fwe(rng: random.Random, size: int) -> Sample:
    words = ["".join(rng.sample("abcdefghiklmnoprstuvwz", 4)) for _ in range(8)]
    text: list[str] = []
    for rank, word in enumerate(words, 1):
        text += [word] * (3 * size // (4 * rank))
    rng.shuffle(text)
    question = "What are the 3 most frequent words in the above coded text, most frequent first?"
    answer = _question(question, "The 3 most frequent words are:", ", ".join(words[:3]))
    return Sample(f"{HEAD}{' '.join(text)}", [answer])


def documents(rng: random.Random, size: int) -> Sample:
    """Four documents with a code each. The questions ask for the code of every second document."""
    codes = {city: str(rng.randrange(1000, 10_000)) for city in rng.sample(CITIES, 4)}
    text = HEAD
    for city, code in codes.items():
        lines = rng.sample(FILLERS, 4)
        lines.insert(rng.randrange(1, 4), f"The access code of the {city} office is {code}.")
        text += f"\n\nAbout the {city} office. {' '.join(lines)}"
    return Sample(
        text,
        [
            _question(
                f"What is the access code of the {city} office?",
                f"The access code of the {city} office is",
                code,
            )
            for city, code in list(codes.items())[::2]
        ],
    )


TASKS: Mapping[str, Callable[[random.Random, int], Sample]] = {
    task.__name__: task
    for task in (niah_single, niah_multikey, niah_multiquery, vt, cwe, fwe, documents)
}


def samples(names: list[str], num: int, size: int) -> Iterator[tuple[str, Sample]]:
    """`num` prompts of each task, in turn. Prompts with noise have `size` sentences of noise, and
    lists are about as long."""
    rngs = {name: random.Random(name) for name in names}
    for _ in range(num):
        for name in names:
            yield name, TASKS[name](rngs[name], size)
