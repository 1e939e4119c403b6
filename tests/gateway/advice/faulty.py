"""Shapes of traffic with one planted fault each, by seed."""

from collections.abc import Callable
from typing import NamedTuple

from engine.protocol import Message, Prompt, TextPart, Tool, ToolResultPart, ToolUsePart
from tests.gateway.advice.shapes import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    START_MS,
    WORDS,
    Author,
    Sent,
    assistant,
    at,
    shuffled_keys,
    single,
    user,
)


class Expected(NamedTuple):
    """The planted fault: any of these kinds, at this path."""

    kinds: tuple[str, ...]
    path: str


def date_in_system(author: Author) -> tuple[list[Sent], Expected]:
    tools, text, sent = author.tools(), author.text(), []
    days, each = author.chance.randint(4, 7), author.chance.randint(5, 9)
    for day in range(days):
        for number in range(each):
            moment = (START_MS // DAY_MS + 1 + day) * DAY_MS
            # Around midnight: the last ones before it and the first ones after.
            moment += (number - each // 2) * 4 * MINUTE_MS
            today = moment // DAY_MS
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
        moment = START_MS // HOUR_MS * HOUR_MS + number * 15_000
        blocks = f"{text}\nThe time is {moment // MINUTE_MS}."
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
    tools, text, given = author.tools(), author.text(), {w: author.line() for w in WORDS[:6]}
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
