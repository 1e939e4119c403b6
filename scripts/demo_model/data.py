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
from typing import Any, TypeAlias

Chunk = tuple[str, bool]
Tool = dict[str, Any]

_CALL = '<tool_call>{"name": "the name", "arguments": {"key": "value"}}</tool_call>'
TOOL_NOTE = f"To call a tool, write {_CALL}"
_FACTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("facts.toml").read_text("utf-8"))
UNKNOWN: str = _FACTS["unknown_answer"]
NO_TOOL: str = _FACTS["no_tool_answer"]

_WORDS: dict[str, list[str]] = _FACTS["words"]
TERM_FORMS = _WORDS["term_forms"]
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
    """One answer and the wordings that ask for it."""

    answer: str
    ask: tuple[str, ...]


def _load_facts() -> list[Fact]:
    facts = []
    for term in _FACTS["terms"]:
        a = term["a"]
        n = a.split(" ", 1)[1] if a.split(" ")[0] in ("a", "an", "the") else a
        ask = tuple(form.format(a=a, n=n) for form in TERM_FORMS)
        facts.append(Fact(term["answer"], ask))
    for question in _FACTS["questions"]:
        facts.append(Fact(question["answer"], tuple(question["ask"])))
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


# The share of arguments that come from a list; the others are invented. So small a model learns the
# listed ones first, and copies the others as well as it can.
LISTED = 0.97
Maker: TypeAlias = "Callable[[random.Random], ToolTask]"


def tool(name: str, description: str, params: dict[str, str]) -> Tool:
    """A tool in the Chat Completions form; `params` maps a name to its description."""
    properties = {
        key: {"type": "string", **({"description": text} if text else {})}
        for key, text in params.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(params)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


@dataclass(frozen=True)
class ToolTask:
    """A question for one tool: the call, what the tool may say, and the sentence made of it."""

    tool: Tool
    question: str
    arguments: dict[str, str]
    result: str
    answer: str
    again: Maker

    @property
    def name(self) -> str:
        """The name of the tool."""
        return str(self.tool["function"]["name"])

    @property
    def call(self) -> str:
        """The call as the model must write it."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>{body}</tool_call>"


def _known(
    rng: random.Random,
    form: str,
    name: str,
    about: list[str],
    argument: tuple[str, str, str],
    outcome: tuple[str, str],
    again: Maker,
) -> ToolTask:
    """`argument` is a name, its description and a value; `outcome` the result and the answer."""
    param, described, value = argument
    schema = tool(name, rng.choice(about), {param: rng.choice(["", described])})
    question = rng.choice(FORMS[form]).format(value)
    return ToolTask(schema, question, {param: value}, *outcome, again)


def _weather(rng: random.Random) -> ToolTask:
    city = rng.choice(CITIES) if rng.random() < LISTED else invented_name(rng)
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 39)
    plain = (sky, f"It is {sky} in {city}.")
    key = rng.choice(["weather", "condition", "sky", "forecast"])
    short = (json.dumps({key: sky}), plain[1])
    full = (
        json.dumps({"city": city, key: sky, "temperature": degrees}),
        f"It is {sky} and {degrees} degrees in {city}.",
    )
    comma = (f"{sky}, {degrees} degrees", full[1])
    outcome = rng.choices([plain, short, full, comma], [60, 35, 3, 2])[0]
    about = [
        "Get the current weather in a city.",
        "Get the weather for a city",
        "Current weather of a city.",
    ]
    argument = ("city", "The name of the city", city)
    return _known(rng, "weather", "get_weather", about, argument, outcome, _weather)


def _lease(rng: random.Random) -> ToolTask:
    ident = rng.choice(LEASE_IDS) if rng.random() < LISTED else identifier(rng)
    state, left = rng.choice(STATES), rng.choice([30, 60, 120, 240, 300, 3600])
    plain = (state, f"Lease {ident} is {state}.")
    short = (json.dumps({"id": ident, "state": state}), plain[1])
    full = (
        json.dumps({"state": state, "seconds_left": left}),
        f"Lease {ident} is {state}, with {left} seconds left.",
    )
    outcome = rng.choices([plain, short, full], [60, 36, 4])[0]
    about = ["Look up a lease by its id.", "Look up a lease"]
    argument = ("id", "The id of the lease", ident)
    return _known(rng, "lease", "lookup_lease", about, argument, outcome, _lease)


def _docs(rng: random.Random) -> ToolTask:
    free = " ".join(rng.sample(COMMON + NOUNS + ADJECTIVES, rng.randint(1, 3)))
    query = rng.choice(TOPICS) if rng.random() < LISTED else free
    found = rng.choice(
        [
            sentence(rng),
            *(rng.choice(FACTS).answer for _ in range(20)),
            f"See page {rng.randint(1, 200)}.",
        ]
    )
    outcome = (rng.choice([found, found, json.dumps({"result": found})]), f"The docs say: {found}")
    about = ["Search the documentation.", "Search the docs for a query."]
    argument = ("query", "The words to search for", query)
    return _known(rng, "docs", "search_docs", about, argument, outcome, _docs)


KNOWN_TASKS: dict[str, Maker] = {
    "get_weather": _weather,
    "lookup_lease": _lease,
    "search_docs": _docs,
}


def tool_task(rng: random.Random) -> ToolTask:
    """A question for one of the three tools that the demos use."""
    return rng.choice(list(KNOWN_TASKS.values()))(rng)


def message(role: str, content: str) -> str:
    """One turn, exactly as the chat template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def tools_block(tools: list[Tool]) -> str:
    """The tools turn, exactly as the chat template writes it."""
    lines = "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tools)
    return message("tools", lines + TOOL_NOTE) if tools else ""


def toolbox(rng: random.Random, most: int = 5) -> list[ToolTask]:
    """One to `most` tools of different names, each with a task that shows what it is for."""
    tasks = {t.name: t for t in (tool_task(rng) for _ in range(rng.randint(1, most)))}
    return list(tasks.values())


def _tool_turn(rng: random.Random, box: list[ToolTask]) -> list[Chunk]:
    shown = {t.name for t in box}
    task = rng.choice(box).again(rng) if box and rng.random() < 0.75 else tool_task(rng)
    user = message("user", task.question)
    if task.name not in shown:
        return [(user, False), (message("assistant", NO_TOOL), True)]
    response = message("tool", f"<tool_response>{task.result}</tool_response>")
    return [
        (user, False),
        (message("assistant", task.call), True),
        (response, False),
        (message("assistant", task.answer), True),
    ]


def turn(rng: random.Random, box: list[ToolTask]) -> list[Chunk]:
    """One exchange: a fact, a tool, something unknown, or chatter not to learn from."""
    draw = rng.random()
    if draw < (0.5 if box else 0.06):
        return _tool_turn(rng, box)
    if draw > 0.95:
        said = message("user", distractor(rng, rng.randint(10, 300)))
        return [
            (said, False),
            (message("assistant", distractor(rng, rng.randint(10, 300))), False),
        ]
    if draw >= 0.91:
        question, answer = rng.choice(QUESTIONS_UNKNOWN), UNKNOWN
    else:
        fact = rng.choice(FACTS)
        question, answer = rng.choice(fact.ask), fact.answer
    question = vary(rng, question)
    if rng.random() < 0.06:
        question = (
            distractor(rng, rng.randint(50, 400)) + rng.choice(["\n", "\n\n", " "]) + question
        )
    return [(message("user", question), False), (message("assistant", answer), True)]


def corpus(rng: random.Random, samples: int = 900) -> list[str]:
    """The text of the tokenizer: everything the model sees, and the prose of the reference."""
    texts = list(REFERENCE)
    texts += [f"{question}\n{fact.answer}" for fact in FACTS for question in fact.ask[:12]]
    for _ in range(samples):
        box = toolbox(rng)
        texts += [distractor(rng, 300), tools_block([t.tool for t in box[:2]])]
        texts += [text for _ in range(2) for text, _ in turn(rng, box)]
    return texts
