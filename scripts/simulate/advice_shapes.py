"""Made-up traffic for the advisor: ten shapes with a planted fault and ten sound ones, by seed.

Prompts are real ones of random words; they pass through the gateway's own names, sketches and
fingerprints. Token counts are bytes / 4.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from engine.protocol import Message, Prompt, TextPart, Tool, ToolResultPart, ToolUsePart, Ttl
from gateway.advice.observation import Observation, Row, Served, observe
from gateway.prompt.fingerprint import Fingerprint, kinds_at, pack, points_of, unpack
from gateway.prompt.names import find_prefixes
from gateway.prompt.sketch import kinds_of, sketch_of

SCOPE = "scope-of-made-up-traffic"
_BYTES_PER_TOKEN = 4
_START_MS = 1_760_000_000_000
_MINUTE_MS, _HOUR_MS, _DAY_MS = 60_000, 3_600_000, 86_400_000
_WORDS = (
    "order ticket customer refund invoice search result parcel address weather city number policy"
    " answer question short polite always never value field amount total history account report"
    " release branch commit review module class method error trace retry queue worker cache token"
).split()


class Expected(NamedTuple):
    """The planted fault: any of these kinds, at this path."""

    kinds: tuple[str, ...]
    path: str


class Sent(NamedTuple):
    at_ms: int
    prompt: Prompt
    marks: tuple[tuple[int, Ttl], ...] = ()


@dataclass
class Author:
    """Writes texts. What it wrote once it does not write again."""

    chance: random.Random
    _numbers: Iterator[int] = field(default_factory=count)

    def words(self, num: int) -> str:
        return " ".join(self.chance.choices(_WORDS, k=num))

    def text(self, lines: int = 0) -> str:
        """Some lines of text, 16 to 40 without a number."""
        lines = lines or self.chance.randint(16, 40)
        return "\n".join(f"{next(self._numbers)}. {self.words(14)}" for _ in range(lines))

    def line(self) -> str:
        return f"{next(self._numbers)} {self.words(self.chance.randint(6, 24))}"

    def tools(self, num: int = 0) -> list[Tool]:
        num = num or self.chance.randint(4, 9)
        return [
            Tool(
                f"tool_{next(self._numbers)}",
                {
                    "type": "object",
                    "properties": {
                        word: {"type": "string", "description": self.words(8)}
                        for word in self.chance.sample(_WORDS, 4)
                    },
                    "required": [],
                },
                self.words(20),
            )
            for _ in range(num)
        ]


def user(*texts: str) -> Message:
    return Message("user", [TextPart(text) for text in texts])


def assistant(text: str) -> Message:
    return Message("assistant", [TextPart(text)])


def at(number: int, gap_ms: int = 20_000) -> int:
    return _START_MS + number * gap_ms


def shuffled_keys(value: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    names = list(value)
    while len(names) > 1 and names == list(value):
        chance.shuffle(names)
    return {name: value[name] for name in names}


def single(author: Author, tools: list[Tool], *system: str) -> Prompt:
    return Prompt([user(author.line())], tools=tools, system=[TextPart(text) for text in system])


# Planted faults.


def date_in_system(author: Author) -> tuple[list[Sent], Expected]:
    tools, text, sent = author.tools(), author.text(), []
    days, each = author.chance.randint(4, 7), author.chance.randint(5, 9)
    for day in range(days):
        for number in range(each):
            moment = (_START_MS // _DAY_MS + 1 + day) * _DAY_MS
            # Around midnight: the last ones before it and the first ones after.
            moment += (number - each // 2) * 4 * _MINUTE_MS
            today = moment // _DAY_MS
            sent.append(Sent(moment, single(author, tools, f"Today is day {today}.\n{text}")))
    return sent, Expected(("date",), "system.0")


def nonce_in_system(author: Author) -> tuple[list[Sent], Expected]:
    head, tail, tools = author.text(), author.text(), author.tools()
    lead = author.chance.choice(["", author.text()])
    sent = []
    for number in range(author.chance.randint(8, 30)):
        nonce = f"request {author.chance.getrandbits(64):016x}"
        blocks = [lead] * bool(lead) + [f"{head}\n{nonce}\n{tail}"]
        sent.append(Sent(at(number), single(author, tools, *blocks)))
    return sent, Expected(("nonce",), f"system.{1 if lead else 0}")


def nonce_block(author: Author) -> tuple[list[Sent], Expected]:
    rest = [author.text() for _ in range(author.chance.randint(1, 3))]
    sent = [
        Sent(at(number), single(author, [], f"id {author.chance.getrandbits(64):x}", *rest))
        for number in range(author.chance.randint(8, 30))
    ]
    return sent, Expected(("nonce",), "system.0")


def time_in_system(author: Author) -> tuple[list[Sent], Expected]:
    text, tools = author.text(), author.tools()
    sent = []
    for number in range(author.chance.randint(24, 40)):
        moment = _START_MS // _HOUR_MS * _HOUR_MS + number * 15_000
        blocks = f"{text}\nThe time is {moment // _MINUTE_MS}."
        sent.append(Sent(moment, single(author, tools, blocks)))
    return sent, Expected(("minute",), "system.0")


def shuffled_tools(author: Author) -> tuple[list[Sent], Expected]:
    tools, text = author.tools(), author.text()
    sent = []
    for number in range(author.chance.randint(8, 30)):
        order = author.chance.sample(tools, len(tools))
        sent.append(Sent(at(number), single(author, order, text)))
    return sent, Expected(("tool_order",), "tools")


def shuffled_schema(author: Author) -> tuple[list[Sent], Expected]:
    tools, text = author.tools(), author.text()
    place = author.chance.randrange(len(tools))
    sent = []
    for number in range(author.chance.randint(8, 20)):
        made = list(tools)
        if number % 2:
            own = tools[place]
            schema = {**own.input_schema}
            schema["properties"] = shuffled_keys(schema["properties"], author.chance)
            made[place] = Tool(own.name, shuffled_keys(schema, author.chance), own.description)
        sent.append(Sent(at(number), single(author, made, text)))
    return sent, Expected(("key_order",), f"tools.{place}")


def shuffled_call(author: Author) -> tuple[list[Sent], Expected]:
    """A conversation whose first call comes back with its keys in another order each time."""
    tools, text, given = author.tools(), author.text(), {w: author.line() for w in _WORDS[:6]}
    said: list[Message] = []
    sent = []
    for number in range(author.chance.randint(8, 16)):
        keys = shuffled_keys(given, author.chance)
        first = [
            user("begin " + text[:30]),
            Message("assistant", [ToolUsePart("call_1", tools[0].name, keys)]),
            Message("user", [ToolResultPart("call_1", text)]),
        ]
        prompt = Prompt([*first, *said], tools=tools, system=[TextPart(text)])
        sent.append(Sent(at(number), prompt))
        said = [*said, assistant(author.line()), user(author.line())]
    return sent, Expected(("key_order",), "messages.1")


def growing_system(author: Author) -> tuple[list[Sent], Expected]:
    text, lead = author.text(), author.chance.choice(["", author.text()])
    sent = []
    for number in range(author.chance.randint(8, 24)):
        blocks = [lead] * bool(lead) + [text]
        sent.append(Sent(at(number), single(author, [], *blocks)))
        text += "\nRemember: " + author.line()
    return sent, Expected(("growing_text",), f"system.{1 if lead else 0}")


def moved_blocks(author: Author) -> tuple[list[Sent], Expected]:
    """A template that puts its texts now here, now there."""
    first, texts, tools = author.text(), [author.text(8) for _ in range(6)], author.tools()
    sent = []
    for number in range(author.chance.randint(10, 24)):
        order = author.chance.sample(texts, len(texts))
        sent.append(Sent(at(number), single(author, tools, first, *order)))
    return sent, Expected(("moved_text",), "system")


def sliding_window(author: Author) -> tuple[list[Sent], Expected]:
    tools, text, said = author.tools(2), author.text(6), []
    keep, sent = author.chance.choice([4, 6, 8]), []
    for number in range(author.chance.randint(16, 30)):
        said.append(user(author.text(4)))
        prompt = Prompt(said[-keep - 1 :], tools=tools, system=[TextPart(text)])
        sent.append(Sent(at(number), prompt))
        said.append(assistant(author.text(4)))
    return sent, Expected(("sliding_history",), "messages")


def time_in_first_message(author: Author) -> tuple[list[Sent], Expected]:
    tools, text = author.tools(3), author.text(6)
    said: list[Message] = []
    sent = []
    question = author.text(10)
    for number in range(author.chance.randint(10, 20)):
        first = user(f"now {at(number)}", question)
        sent.append(Sent(at(number), Prompt([first, *said], tools=tools, system=[TextPart(text)])))
        said = [*said, assistant(author.text(5)), user(author.line())]
    return sent, Expected(("nonce",), "messages.0")


# Sound shapes.


def conversations(author: Author) -> list[Sent]:
    tools, text, sent = author.tools(), author.text(), []
    for talk in range(author.chance.randint(2, 5)):
        said: list[Message] = []
        for turn in range(author.chance.randint(4, 14)):
            said = [*said, user(author.line())]
            sent.append(
                Sent(at(talk * 40 + turn), Prompt(said, tools=tools, system=[TextPart(text)]))
            )
            said = [*said, assistant(author.text(3))]
    return sent


def documents(author: Author) -> list[Sent]:
    text, sent = author.text(), []
    for number in range(author.chance.randint(4, 9)):
        document = author.text(24)
        for question in range(author.chance.randint(1, 5)):
            message = user(document, author.line())
            sent.append(Sent(at(number * 6 + question), Prompt([message], system=[TextPart(text)])))
    return sent


def customers(author: Author) -> list[Sent]:
    """Each customer has a system prompt of his own."""
    texts = [author.text(20) for _ in range(author.chance.randint(5, 14))]
    return [
        Sent(at(number), single(author, [], author.chance.choice(texts)))
        for number in range(author.chance.randint(20, 60))
    ]


def labels(author: Author) -> list[Sent]:
    text = author.text()
    return [
        Sent(at(number), Prompt([user(author.text(6))], system=[TextPart(text)]))
        for number in range(author.chance.randint(10, 50))
    ]


def released(author: Author) -> list[Sent]:
    """The system prompt is changed once."""
    tools, text, sent = author.tools(), author.text(), []
    total = author.chance.randint(24, 50)
    for number in range(total):
        system = text if number < total // 2 else f"{text}\nBe brief."
        sent.append(Sent(at(number), single(author, tools, system)))
    return sent


def two_agents(author: Author) -> list[Sent]:
    num = author.chance.randint(3, 7)
    agents = [(author.tools(num), author.text()), (author.tools(num), author.text())]
    sent = []
    for number in range(author.chance.randint(14, 40)):
        tools, text = author.chance.choice(agents)
        sent.append(Sent(at(number), single(author, tools, text)))
    return sent


def compacted(author: Author) -> list[Sent]:
    tools, text, sent = author.tools(), author.text(), []
    said: list[Message] = []
    for number in range(author.chance.randint(24, 60)):
        if len(said) > 20:
            said = [user("Summary: " + author.text(6)), assistant("Understood.")]
        said = [*said, user(author.line())]
        sent.append(Sent(at(number), Prompt(said, tools=tools, system=[TextPart(text)])))
        said = [*said, assistant(author.text(3))]
    return sent


def forked(author: Author) -> list[Sent]:
    """Some turns are asked again, or in other words."""
    text, sent = author.text(), []
    said: list[Message] = []
    for number in range(author.chance.randint(10, 24)):
        if said and author.chance.random() < 0.25:
            said = said[:-2]
        said = [*said, user(author.line())]
        sent.append(Sent(at(number), Prompt(said, system=[TextPart(text)])))
        said = [*said, assistant(author.text(3))]
    return sent


def examples(author: Author) -> list[Sent]:
    shots = [
        message
        for _ in range(author.chance.randint(3, 8))
        for message in (user(author.text(3)), assistant(author.line()))
    ]
    return [
        Sent(at(number), Prompt([*shots, user(author.line())]))
        for number in range(author.chance.randint(10, 40))
    ]


def split_test(author: Author) -> list[Sent]:
    """Two wordings of one prompt, chosen by chance."""
    text, tools = author.text(), author.tools()
    wordings = [f"Be polite.\n{text}", f"Be brief.\n{text}"]
    return [
        Sent(at(number), single(author, tools, author.chance.choice(wordings)))
        for number in range(author.chance.randint(24, 60))
    ]


FAULTY: dict[str, Callable[[Author], tuple[list[Sent], Expected]]] = {
    made.__name__: made
    for made in (
        date_in_system,
        nonce_in_system,
        nonce_block,
        time_in_system,
        shuffled_tools,
        shuffled_schema,
        shuffled_call,
        growing_system,
        moved_blocks,
        sliding_window,
        time_in_first_message,
    )
}
SOUND: dict[str, Callable[[Author], list[Sent]]] = {
    made.__name__: made
    for made in (
        conversations,
        documents,
        customers,
        labels,
        released,
        two_agents,
        compacted,
        forked,
        examples,
        split_test,
    )
}


def observed(sent: list[Sent]) -> list[Observation]:
    """The turns as a ledger would give them: unmarked ones were computed as a whole."""
    made = []
    for number, each in enumerate(sent):
        row = Row(
            id=f"msg_{number:04}",
            at_ms=each.at_ms,
            workspace="made-up",
            key="key",
            model="model",
            dialect="openai",
            served=Served(input=0, computed=0, begun_ms=each.at_ms + 300),
            rates=None,
        )
        found = observe(row, unpack(fingerprint(each)))
        assert found is not None
        made.append(found)
    return made


def fingerprint(sent: Sent) -> bytes:
    prompt = sent.prompt
    prefixes = find_prefixes(prompt, SCOPE)
    points = points_of(prefixes)
    tokens = [max(1, point.num_bytes // _BYTES_PER_TOKEN) for point in points]
    return pack(
        Fingerprint(
            model="model",
            parameters=b"",
            num_tools=len(prompt.tools),
            num_system=len(prompt.system),
            points=points,
            num_tokens=tokens[-1] + 4,
            tokens=tokens,
            kinds=kinds_at(points, kinds_of(prompt)),
            marks=list(sent.marks),
            sketch=sketch_of(prompt, SCOPE),
        )
    )
