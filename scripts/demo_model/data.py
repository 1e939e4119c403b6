"""The words of the demo model's training text: facts, and the distractors they are asked behind.

Everything is drawn from a `random.Random`, so one seed gives one stream of text. A conversation is
a list of chunks, each one rendered message and a flag that says whether its answer is learned.
"""

import base64
import json
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics as _topics
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Chunk = tuple[str, bool]

TOOL_NOTE = (
    "To call a tool, write "
    '<tool_call>{"name": "the name", "arguments": {"key": "value"}}</tool_call>'
)
_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("facts.toml").read_text("utf-8"))
UNKNOWN: str = _TABLES["unknown_answer"]
NO_TOOL: str = _TABLES["no_tool_answer"]
_WORDS: dict[str, list[str]] = _TABLES["words"] | {
    "unknown": _TABLES["unknown"],
    "topics": [term["a"].split(" ", 1)[-1] for term in _TABLES["terms"]],
    # Real English and code, which come with every Python.
    "topics_of_python": [_topics.topics[key] for key in sorted(_topics.topics)],
    "scripts": [
        *"äöüßéèñçøåабвгдежзиклмнопрстαβγδεζηθ日本語中文字漢字かなカナ한국어한글שלוםمرحبا😀🚀✨—“”…€£"
    ],
}
KINDS: dict[str, list[str]] = _TABLES["kinds"]


@dataclass(frozen=True)
class Fact:
    """One answer and the wordings that ask for it."""

    answer: str
    ask: tuple[str, ...]


def _load_facts() -> list[Fact]:
    facts = []
    for term in _TABLES["terms"]:
        article, _, rest = term["a"].partition(" ")
        bare = rest if article in ("a", "an", "the") else term["a"]
        ask = tuple(form.format(a=term["a"], n=bare) for form in _WORDS["term_forms"])
        facts.append(Fact(term["answer"], ask))
    facts += [Fact(table["answer"], tuple(table["ask"])) for table in _TABLES["questions"]]
    return facts


FACTS = _load_facts()


def new_word(rng: random.Random, kind: str) -> str:
    """Draw a word of a kind, or a number where the kind is a range such as `2-12`."""
    if kind in _MADE:
        return _MADE[kind](rng)
    span = re.fullmatch(r"(\d+)-(\d+)", kind)
    if span is not None:
        return str(rng.randint(int(span[1]), int(span[2])))
    return rng.choice(_WORDS[kind])


def fill(rng: random.Random, form: str, **words: str) -> str:
    """Write a form of facts.toml. `words` are words that were drawn before, each by its kind."""
    words_by_place = {f"{kind}#1": word for kind, word in words.items()}

    def draw(place: re.Match[str]) -> str:
        kind, _, tag = place[1].partition("#")
        word = words_by_place.get(place[1])
        if word is None:
            word = new_word(rng, kind)
        if tag:
            words_by_place[place[1]] = word
        return word

    return re.sub(r"\{([\w#-]+)\}", draw, form)


def invented_name(rng: random.Random) -> str:
    """A capitalised word that is in no list, so that arguments are copied and not remembered."""
    syllables = (
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4))
    )
    return ("".join(syllables) + rng.choice(["", "n", "r", "s", "l"])).capitalize()


def identifier(rng: random.Random) -> str:
    """An id as systems write them: L-1042, 3f9a, ORD77, 42."""
    prefix = rng.choice(["", "", "L-", "A", "X-", "ORD", "K", "lease-", "le_", "id-"])
    number = str(rng.randint(1, 99999))
    return f"{rng.getrandbits(24):x}" if rng.random() < 0.15 else prefix + number


def _glossary(rng: random.Random) -> str:
    fact = rng.choice(FACTS)
    ask = rng.choice(fact.ask)
    return rng.choice([f"{fact.answer}\n", f"Q: {ask}\nA: {fact.answer}\n", f"{ask} "])


def _reference(rng: random.Random) -> str:
    text = rng.choice(_WORDS["topics_of_python"])
    start = rng.randrange(max(1, len(text) - 800))
    return text[start : start + 800]


def _found(rng: random.Random) -> str:
    answers = [rng.choice(FACTS).answer for _ in range(20)]
    return rng.choice([*answers, fill(rng, "{sentence}"), fill(rng, "See page {1-200}.")])


_MADE: dict[str, Callable[[random.Random], str]] = {
    "sentence": lambda rng: fill(rng, rng.choice(_WORDS["sentences"])),
    "name": invented_name,
    "id": identifier,
    "base64": lambda rng: base64.b64encode(rng.randbytes(rng.randint(3, 30))).decode(),
    "glossary": _glossary,
    "reference": _reference,
    "found": _found,
}


def vary(rng: random.Random, question: str) -> str:
    """Write a question as hurried people write it: wrapped, in lower case, without its mark."""
    if rng.random() < 0.25:
        question = rng.choice(_WORDS["wraps"]).format(q=question)
    if rng.random() < 0.2:
        question = question.lower()
    return question.rstrip("?.!") if rng.random() < 0.15 else question


def distractor(rng: random.Random, chars: int) -> str:
    """At least `chars` characters of one kind of text; sometimes one piece over and over."""
    name = rng.choice([*KINDS, "repeat", "mixed"])

    def piece() -> str:
        forms = KINDS.get(name) or rng.choice(list(KINDS.values()))
        return fill(rng, rng.choice(forms))

    if name == "repeat":
        repeated = piece() + rng.choice(["", " ", "\n"])
        return repeated * (chars // len(repeated) + 1)
    parts: list[str] = []
    while chars > 0:
        parts.append(piece())
        chars -= len(parts[-1])
    return "".join(parts)


# The share of arguments that come from a list; the others are invented. So small a model learns the
# listed ones first, and copies the others as well as it can.
LISTED = 0.97


@dataclass(frozen=True)
class ToolTask:
    """A question for one tool: its schema, the call, its result, and the sentence made of it."""

    tool: str
    schema: dict[str, Any]
    question: str
    call: str
    result: str
    answer: str


_TOOLS = {table["name"]: table for table in _TABLES["tools"]}
TOOLS = tuple(_TOOLS)


def task_of(rng: random.Random, tool: str) -> ToolTask:
    """A tool has one argument, and its schema is in the Chat Completions form."""
    table = _TOOLS[tool]
    param = _TOOLS[tool]["param"]
    about = rng.choice([{}, {"description": table["described"]}])
    schema = {
        "type": "object",
        "properties": {param: {"type": "string", **about}},
        "required": [param],
    }
    described = {"name": tool, "description": rng.choice(table["about"]), "parameters": schema}
    is_listed = rng.random() < LISTED
    value = rng.choice(_WORDS[table["listed"]]) if is_listed else fill(rng, table["invented"])
    weights = [outcome[0] for outcome in table["outcomes"]]
    _, result, answer = rng.choices(table["outcomes"], weights)[0]
    # Both are filled as one text, so that the answer has the words that the result drew.
    result, _, answer = fill(rng, f"{result}\0{answer}", value=value).partition("\0")
    body = json.dumps({"name": tool, "arguments": {param: value}}, ensure_ascii=False)
    return ToolTask(
        tool,
        {"type": "function", "function": described},
        rng.choice(_TABLES["tool_questions"][table["questions"]]).format(value),
        f"<tool_call>{body}</tool_call>",
        result,
        answer,
    )


def message(role: str, content: str) -> str:
    """One turn, exactly as the chat template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def tools_block(box: list[ToolTask]) -> str:
    """The tools turn, exactly as the chat template writes it."""
    lines = "".join(json.dumps(task.schema, ensure_ascii=False) + "\n" for task in box)
    return message("tools", lines + TOOL_NOTE) if box else ""


def toolbox(rng: random.Random, most: int = 5) -> list[ToolTask]:
    """One to `most` draws of the tools, without doubles, each with a task for the tool."""
    tools = dict.fromkeys(rng.choice(TOOLS) for _ in range(rng.randint(1, most)))
    return [task_of(rng, tool) for tool in tools]


def _tool_turn(rng: random.Random, box: list[ToolTask]) -> list[Chunk]:
    tools = [task.tool for task in box]
    tool = rng.choice(tools) if box and rng.random() < 0.75 else rng.choice(TOOLS)
    task = task_of(rng, tool)
    user = (message("user", task.question), False)
    if tool not in tools:
        return [user, (message("assistant", NO_TOOL), True)]
    return [
        user,
        (message("assistant", task.call), True),
        (message("tool", f"<tool_response>{task.result}</tool_response>"), False),
        (message("assistant", task.answer), True),
    ]


def turn(rng: random.Random, box: list[ToolTask]) -> list[Chunk]:
    """One exchange: a fact, a tool, something unknown, or chatter not to learn from."""
    draw = rng.random()
    if draw < (0.5 if box else 0.06):
        return _tool_turn(rng, box)
    if draw > 0.95:
        texts = (distractor(rng, rng.randint(10, 300)) for _ in range(2))
        roles = zip(("user", "assistant"), texts, strict=True)
        return [(message(role, text), False) for role, text in roles]
    fact = rng.choice(FACTS)
    question = rng.choice(fact.ask)
    answer = fact.answer
    if draw >= 0.91:
        question = rng.choice(_WORDS["unknown"])
        answer = UNKNOWN
    question = vary(rng, question)
    if rng.random() < 0.06:
        before = distractor(rng, rng.randint(50, 400))
        question = before + rng.choice(["\n", "\n\n", " "]) + question
    return [(message("user", question), False), (message("assistant", answer), True)]


def corpus(rng: random.Random) -> list[str]:
    """The text of the tokenizer: everything the model sees, and the prose of the reference."""
    texts = list(_WORDS["topics_of_python"])
    for fact in FACTS:
        texts += [f"{question}\n{fact.answer}" for question in fact.ask[:12]]
    for _ in range(900):
        box = toolbox(rng)
        texts += [distractor(rng, 300), tools_block(box[:2])]
        for _ in range(2):
            texts += [text for text, _ in turn(rng, box)]
    return texts


VOCAB = 4096
END = "<|im_end|>"
CONTROL = ("<|endoftext|>", "<|im_start|>", END)
# They are not "special": a caller parses them, so decoding keeps them when it skips control tokens.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass
class Example:
    """Token ids of one conversation, and which of them are answers."""

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)


class Encoder:
    """Turns chunks into rows; a chunk begins with a control token, so it can be encoded alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """The token ids of a text; nothing is added to it."""
        return list(self.tokenizer(text)["input_ids"])

    def add(self, row: Example, chunks: list[Chunk]) -> None:
        """Append messages, and mark the tokens of the answers among them."""
        for text, learned in chunks:
            ids = self.ids(text)
            # The header, with which the prompt ends, and the line break after the end are not
            # learned.
            row.learned += [learned and 3 <= i < len(ids) - 1 for i in range(len(ids))]
            row.ids += ids

    def add_ids(self, row: Example, ids: list[int]) -> None:
        """Append tokens that are not learned."""
        row.ids += ids
        row.learned += [False] * len(ids)

    def systems(self, rng: random.Random, tokens: int) -> list[int]:
        """One to three system blocks of about `tokens` tokens in all."""
        blocks = rng.choice([1, 1, 2, 3])
        ids: list[int] = []
        for _ in range(blocks):
            size = max(1, tokens // blocks - 5)
            if rng.random() < 0.1:
                body = [rng.randrange(len(CONTROL), VOCAB - len(MARKS)) for _ in range(size)]
            else:
                body = self.ids(distractor(rng, size * 5))[:size]
            ids += self.ids("<|im_start|>system\n") + body + self.ids(END + "\n")
        return ids
