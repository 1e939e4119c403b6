"""Shapes of traffic with one planted fault each, by seed: prompts, and bodies of all dialects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.protocol import Message, Prompt, TextPart, ToolResultPart, ToolUsePart
from tests.gateway.advice.bodies import (
    MARK,
    NUM,
    Bodies,
    block,
    chat_body,
    content,
    gemini_body,
    image,
    messages_body,
    says,
    tools_of,
)
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

Make = Callable[[Author], Any]


@dataclass(frozen=True)
class Planted:
    """The fault of a shape: any of these kinds, at this path."""

    make: Make
    kinds: tuple[str, ...]
    path: str


# What makes `Sent`, and what makes `Bodies`.
FAULTY: dict[str, Planted] = {}
FAULTY_BODIES: dict[str, Planted] = {}
_VARIES = ("varying_text", "nonce", "date")


def planted(into: dict[str, Planted], *kinds: str, path: str) -> Callable[[Make], Make]:
    def note(make: Make) -> Make:
        into[make.__name__] = Planted(make, kinds, path)
        return make

    return note


@planted(FAULTY, "date", path="system.0")
def date_in_system(author: Author) -> list[Sent]:
    tools = author.tools()
    text = author.text()
    sent = []
    days = author.chance.randint(4, 7)
    num_turns = author.chance.randint(5, 9)
    for day in range(days):
        for number in range(num_turns):
            moment = (START_MS // DAY_MS + 1 + day) * DAY_MS
            # Around midnight: the last ones before it and the first ones after.
            moment += (number - num_turns // 2) * 4 * MINUTE_MS
            today = moment // DAY_MS
            sent.append(Sent(moment, single(author, tools, f"Today is day {today}.\n{text}")))
    return sent


@planted(FAULTY, "nonce", path="system.1")
def nonce_in_system(author: Author) -> list[Sent]:
    lead = author.text()
    head = author.text()
    tail = author.text()
    tools = author.tools()
    sent = []
    for number in range(author.chance.randint(8, 30)):
        nonce = f"request {author.chance.getrandbits(64):016x}"
        prompt = single(author, tools, lead, f"{head}\n{nonce}\n{tail}")
        sent.append(Sent(at(number), prompt))
    return sent


@planted(FAULTY, "minute", path="system.0")
def time_in_system(author: Author) -> list[Sent]:
    text, tools = author.text(), author.tools()
    sent = []
    for number in range(author.chance.randint(24, 40)):
        moment = START_MS // HOUR_MS * HOUR_MS + number * 15_000
        blocks = f"{text}\nThe time is {moment // MINUTE_MS}."
        sent.append(Sent(moment, single(author, tools, blocks)))
    return sent


@planted(FAULTY, "key_order", path="messages.1")
def shuffled_call(author: Author) -> list[Sent]:
    """A conversation whose first call comes back with its keys in another order each time."""
    tools = author.tools()
    text = author.text()
    arguments = {w: author.line() for w in WORDS[:6]}
    messages: list[Message] = []
    sent = []
    for number in range(author.chance.randint(8, 16)):
        keys = shuffled_keys(arguments, author.chance)
        first = [
            user("begin " + text[:30]),
            Message("assistant", [ToolUsePart("call_1", tools[0].name, keys)]),
            Message("user", [ToolResultPart("call_1", text)]),
        ]
        prompt = Prompt([*first, *messages], tools=tools, system=[TextPart(text)])
        sent.append(Sent(at(number), prompt))
        messages = [*messages, assistant(author.line()), user(author.line())]
    return sent


@planted(FAULTY, "sliding_history", path="messages")
def sliding_window(author: Author) -> list[Sent]:
    tools = author.tools(2)
    text = author.text(6)
    messages = []
    keep = author.chance.choice([4, 6, 8])
    sent = []
    for number in range(author.chance.randint(16, 30)):
        messages.append(user(author.text(4)))
        prompt = Prompt(messages[-keep - 1 :], tools=tools, system=[TextPart(text)])
        sent.append(Sent(at(number), prompt))
        messages.append(assistant(author.text(4)))
    return sent


@planted(FAULTY_BODIES, "nonce", path="system.0")
def nonce_deep_in_a_long_text(author: Author) -> Bodies:
    """Behind the part of the text whose pieces are kept."""
    head = author.text(400)
    tail = author.text(40)
    bodies = []
    for _ in range(NUM):
        system = f"{head}\ntrace {author.chance.getrandbits(64):x}\n{tail}"
        bodies.append(chat_body(says("system", system), says("user", author.line())))
    return bodies


@planted(FAULTY_BODIES, "tool_order", path="tools")
def tools_shuffled_behind_a_marker(author: Author) -> Bodies:
    first, *other_tools = tools_of(author)
    first["cache_control"] = MARK
    system = author.text()
    bodies = []
    for _ in range(NUM):
        order = [first, *author.chance.sample(other_tools, len(other_tools))]
        bodies.append(messages_body(says("user", author.line()), tools=order, system=system))
    return bodies


@planted(FAULTY_BODIES, "key_order", path="tools.2")
def keys_of_a_declaration_shuffled(author: Author) -> Bodies:
    tools = author.tools()
    system = author.text()
    bodies = []
    for number in range(NUM):
        declared = [
            {"name": t.name, "description": t.description, "parameters": t.input_schema}
            for t in tools
        ]
        if number % 2:
            schema = tools[2].input_schema
            inner = shuffled_keys(schema["properties"], author.chance)
            declared[2]["parameters"] = {**schema, "properties": inner}
        bodies.append(
            gemini_body(
                content("user", author.line()),
                tools=[{"functionDeclarations": declared}],
                systemInstruction={"parts": [{"text": system}]},
            )
        )
    return bodies


@planted(FAULTY_BODIES, "growing_text", path="system.0")
def growing_instructions(author: Author) -> Bodies:
    text = author.text()
    bodies = []
    for _ in range(NUM):
        bodies.append({"model": "m", "instructions": text, "input": author.line()})
        text += "\nRemember: " + author.line()
    return bodies


@planted(FAULTY_BODIES, *_VARIES, path="messages.0")
def changing_image_before_a_document(author: Author) -> Bodies:
    document = author.text()
    bodies = []
    for number in range(NUM):
        blocks = [image(640 + number, 480), block(document), block(author.line())]
        bodies.append(messages_body(says("user", blocks)))
    return bodies


@planted(FAULTY_BODIES, "moved_text", path="messages")
def documents_in_another_order(author: Author) -> Bodies:
    documents = [author.text(10) for _ in range(5)]
    bodies = []
    for _ in range(NUM):
        order = [*author.chance.sample(documents, 5), author.line()]
        parts = [{"type": "input_text", "text": text} for text in order]
        bodies.append({"model": "m", "instructions": "Answer.", "input": [says("user", parts)]})
    return bodies


@planted(FAULTY_BODIES, "tool_set", path="tools")
def a_tool_that_comes_and_goes(author: Author) -> Bodies:
    tools = tools_of(author)
    system = author.text()
    bodies = []
    ways = author.chance.sample(range(8), 8)
    for number in range(NUM):
        extra = [tool for bit, tool in enumerate(tools[:3]) if ways[number % 8] >> bit & 1]
        order = extra + tools[3:]
        bodies.append(messages_body(says("user", author.line()), tools=order, system=system))
    return bodies


@planted(FAULTY_BODIES, "varying_text", path="system.0")
def blanks_that_come_and_go(author: Author) -> Bodies:
    text = author.text()
    last_text = author.text()
    bodies = []
    for number in range(NUM):
        system = [block(text + " " * (number % 5)), block(last_text)]
        bodies.append(messages_body(says("user", author.line()), system=system))
    return bodies


@planted(FAULTY_BODIES, "nonce", path="messages.0")
def reminder_in_the_first_message(author: Author) -> Bodies:
    """A conversation through the Responses API whose first message tells the time of each turn."""
    question = author.text(10)
    messages = Bodies()
    bodies = []
    for number in range(NUM):
        first = [{"type": "input_text", "text": text} for text in (f"now {number}", question)]
        bodies.append(
            {"model": "m", "instructions": "Help.", "input": [says("user", first), *messages]}
        )
        answer = [{"type": "output_text", "text": author.text(5)}]
        messages = [*messages, says("assistant", answer), says("user", author.line())]
    return bodies
