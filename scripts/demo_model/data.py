"""The words of the demo model's training text: facts, and the distractors they are asked behind.

Everything is drawn from a `random.Random`, so one seed gives one stream of text. A conversation is
a list of chunks, each one rendered message and a flag that says whether its answer is learned.
"""

from __future__ import annotations

import base64
import json
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics as _topics
from typing import Any

Chunk = tuple[str, bool]
Tool = dict[str, Any]

_CALL = '<tool_call>{"name": "the name", "arguments": {"key": "value"}}</tool_call>'
TOOL_NOTE = f"To call a tool, write {_CALL}"
_FACTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("facts.toml").read_text("utf-8"))
UNKNOWN: str = _FACTS["unknown_answer"]
NO_TOOL: str = _FACTS["no_tool_answer"]

_WORDS: dict[str, list[str]] = _FACTS["words"]
TERM_FORMS = _WORDS["term_forms"]
# Never trained on: the eval asks with these to see whether the wording matters.
HELD_OUT_FORMS = ("What exactly is {a}?", "Could you please explain {a} to me?")
HELD_OUT_WRAP = "I wonder: {q}"
CITIES = _WORDS["cities"]
LEASE_IDS = _WORDS["lease_ids"]
SKIES = _WORDS["skies"]
STATES = _WORDS["states"]
PARAMS = _WORDS["params"]
VERBS = _WORDS["verbs"]
NOUNS = _WORDS["nouns"]
COMMON = _WORDS["common"]
ADJECTIVES = _WORDS["adjectives"]
QUESTIONS_UNKNOWN: list[str] = _FACTS["unknown"]
FORMS: dict[str, list[str]] = _FACTS["tool_questions"]
TOPICS: list[str] = [term["a"].split(" ", 1)[-1] for term in _FACTS["terms"]]
# Real English and code, which every Python has with it.
REFERENCE = [_topics.topics[key] for key in sorted(_topics.topics)]
_SCRIPTS = (
    "äöüßéèñçøåабвгдежзиклмнопрстαβγδεζηθ日本語中文字漢字かなカナ한국어한글שלוםمرحبا😀🚀✨—“”…€£"
)


@dataclass(frozen=True)
class Fact:
    """One answer and the wordings that ask for it; `held_out` wordings are for the eval only."""

    answer: str
    ask: tuple[str, ...]
    held_out: tuple[str, ...]


def _load_facts() -> list[Fact]:
    facts = []
    for term in _FACTS["terms"]:
        a = term["a"]
        n = a.split(" ", 1)[1] if a.split(" ")[0] in ("a", "an", "the") else a
        ask = tuple(form.format(a=a, n=n) for form in TERM_FORMS)
        held = tuple(form.format(a=a, n=n) for form in HELD_OUT_FORMS)
        facts.append(Fact(term["answer"], ask, held))
    for question in _FACTS["questions"]:
        ask = tuple(question["ask"])
        facts.append(Fact(question["answer"], ask, (HELD_OUT_WRAP.format(q=ask[0]),)))
    return facts


FACTS = _load_facts()


def vary(rng: random.Random, question: str) -> str:
    """Write a question as hurried people write it: wrapped, in lower case, without its mark."""
    if rng.random() < 0.25:
        question = rng.choice(_WORDS["wraps"]).format(q=question)
    if rng.random() < 0.2:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    return question


def sentence(rng: random.Random) -> str:
    """A plain English sentence that says nothing."""
    acts, adverbs, pick = _WORDS["acts"], _WORDS["adverbs"], rng.choice
    noun, adj, act = pick(COMMON), pick(ADJECTIVES), pick(acts)
    forms = (
        f"The {adj} {noun} {act} the {pick(COMMON)} {pick(adverbs)}.",
        f"Every {noun} {act} a {pick(ADJECTIVES)} {pick(COMMON)}, "
        f"and the {pick(COMMON)} {pick(acts)} it.",
        f"If the {noun} {act} nothing, ask the {pick(COMMON)} {pick(adverbs)}.",
        f"A {noun} must not wait for the {adj} {pick(COMMON)}; see section {rng.randint(1, 99)}.",
        f"{rng.randint(2, 900)} {adj} {noun}s were counted in {rng.randint(1950, 2030)}.",
    )
    return pick(forms)


def invented_name(rng: random.Random) -> str:
    """A capitalised word that is in no list, so that arguments are copied and not remembered."""
    syllables = (
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4))
    )
    return ("".join(syllables) + rng.choice(["", "n", "r", "s", "l"])).capitalize()


def identifier(rng: random.Random) -> str:
    """An id as systems write them: L-1042, 3f9a, ORD77, 42."""
    number = str(rng.randint(1, 99999))
    prefix = rng.choice(["", "", "L-", "A", "X-", "ORD", "K", "lease-", "le_", "id-"])
    return f"{rng.getrandbits(24):x}" if rng.random() < 0.15 else prefix + number


def _manual(rng: random.Random) -> str:
    number = f"{rng.randint(1, 30)}.{rng.randint(1, 30)}"
    head = f"{number} {rng.choice(ADJECTIVES).title()} {rng.choice(COMMON)}s"
    return f"\n## {head}\n" + " ".join(sentence(rng) for _ in range(rng.randint(2, 6))) + "\n"


def _listing(rng: random.Random) -> str:
    return f"- {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}: {sentence(rng)}\n"


def _log(rng: random.Random) -> str:
    level = rng.choice(["INFO", "WARN", "ERROR", "DEBUG"])
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
    date = f"2024-0{rng.randint(1, 9)}-{rng.randint(10, 28)}"
    return f"{date} {clock} {level} {rng.choice(NOUNS)}: {sentence(rng)}\n"


def _code(rng: random.Random) -> str:
    verb, noun, param = rng.choice(VERBS), rng.choice(NOUNS), rng.choice(PARAMS)
    loop = f"    for {param} in {noun}s:\n        if {param} == {rng.randint(0, 99)}:\n"
    body = f"{loop}            return {verb}({param})\n    return {rng.randint(0, 9)}\n"
    return f"def {verb}_{noun}({param}: str) -> int:\n{body}\n"


def _records(rng: random.Random) -> str:
    record = {
        p: rng.choice([identifier(rng), rng.choice(NOUNS), rng.randint(0, 999)])
        for p in rng.sample(PARAMS, 4)
    }
    return json.dumps(record, indent=rng.choice([None, 2])) + "\n"


def _gibberish(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return "".join(rng.choice(_SCRIPTS) for _ in range(rng.randint(3, 12))) + " "
    return (
        base64.b64encode(rng.randbytes(rng.randint(3, 30))).decode() + " "
        if kind == 1
        else invented_name(rng) + " "
    )


def _glossary(rng: random.Random) -> str:
    fact = rng.choice(FACTS)
    return rng.choice(
        [
            f"{fact.answer}\n",
            f"Q: {rng.choice(fact.ask)}\nA: {fact.answer}\n",
            f"{rng.choice(fact.ask)} ",
        ]
    )


def _reference(rng: random.Random) -> str:
    text = rng.choice(REFERENCE)
    start = rng.randrange(max(1, len(text) - 800))
    return text[start : start + 800]


def _csv(rng: random.Random) -> str:
    price = f"{rng.random() * 100:.2f}"
    return f"{identifier(rng)},{rng.choice(CITIES)},{rng.choice(NOUNS)},{price}\n"


def _dialogue(rng: random.Random) -> str:
    question = rng.choice(QUESTIONS_UNKNOWN)
    return f"{invented_name(rng).upper()}: {question} {sentence(rng)}\n\n"


def _markup(rng: random.Random) -> str:
    return f'<li class="{rng.choice(NOUNS)}"><b>{rng.randint(1, 99)}%</b> {sentence(rng)}</li>\n'


KINDS: dict[str, Callable[[random.Random], str]] = {
    "manual": _manual,
    "list": _listing,
    "log": _log,
    "code": _code,
    "json": _records,
    "gibberish": _gibberish,
    "glossary": _glossary,
    "reference": _reference,
    "words": lambda rng: rng.choice(COMMON + ADJECTIVES + NOUNS + VERBS) + " ",
    "lorem": lambda rng: " ".join(rng.choices(_WORDS["latin"], k=8)).capitalize() + ". ",
    "prose": lambda rng: sentence(rng) + " ",
}
# Kinds that training never shows; the eval uses them as well.
HELD_OUT_KINDS: dict[str, Callable[[random.Random], str]] = {
    "markup": _markup,
    "dialogue": _dialogue,
}


def distractor(rng: random.Random, chars: int, kind: str | None = None) -> str:
    """At least `chars` characters of one kind of text; sometimes one piece over and over."""
    name = kind or rng.choice([*KINDS, "repeat", "mixed"])
    if name == "repeat":
        piece = KINDS[rng.choice(list(KINDS))](rng) + rng.choice(["", " ", "\n"])
        return piece * (chars // len(piece) + 1)
    parts: list[str] = []
    while chars > 0:
        make = (
            KINDS[rng.choice(list(KINDS))] if name == "mixed" else {**KINDS, **HELD_OUT_KINDS}[name]
        )
        parts.append(make(rng))
        chars -= len(parts[-1])
    return "".join(parts)


def _word(rng: random.Random) -> str:
    return rng.choice(COMMON + CITIES)


def echo_text(rng: random.Random) -> str:
    """Something to repeat; it teaches copying with many tokens at once."""
    make = rng.choice([sentence, invented_name, identifier, _csv, _word])
    count = 1 if make in (sentence, _csv) else rng.randint(1, 10)
    return " ".join(make(rng) for _ in range(count)).strip()
