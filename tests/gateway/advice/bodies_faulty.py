"""Requests of all dialects with one planted fault each, by seed."""

from collections.abc import Callable

from tests.gateway.advice.bodies import (
    MARK,
    NUM,
    Bodies,
    block,
    chat_body,
    content,
    functions_of,
    gemini_body,
    image,
    messages_body,
    says,
    tools_of,
)
from tests.gateway.advice.faulty import Expected
from tests.gateway.advice.shapes import Author, shuffled_keys

_VARIES = ("varying_text", "nonce", "date")


def date_in_a_tool(author: Author) -> tuple[Bodies, Expected]:
    tools, system = tools_of(author), author.text()
    made = []
    for number in range(NUM):
        told = f"{tools[1]['description']} Today is 2026-11-{number + 1:02}."
        own = [tools[0], {**tools[1], "description": told}, *tools[2:]]
        made.append(messages_body(says("user", author.line()), tools=own, system=system))
    return made, Expected(_VARIES, "tools.1")


def nonce_deep_in_a_long_text(author: Author) -> tuple[Bodies, Expected]:
    """Behind the part of the text whose pieces are kept."""
    head, tail = author.text(400), author.text(40)
    made = []
    for _ in range(NUM):
        system = f"{head}\ntrace {author.chance.getrandbits(64):x}\n{tail}"
        made.append(chat_body(says("system", system), says("user", author.line())))
    return made, Expected(("nonce",), "system.0")


def tools_shuffled_behind_a_marker(author: Author) -> tuple[Bodies, Expected]:
    first, *rest = tools_of(author)
    first["cache_control"] = MARK
    system = author.text()
    made = []
    for _ in range(NUM):
        order = [first, *author.chance.sample(rest, len(rest))]
        made.append(messages_body(says("user", author.line()), tools=order, system=system))
    return made, Expected(("tool_order",), "tools")


def keys_of_a_function_shuffled(author: Author) -> tuple[Bodies, Expected]:
    tools, system = functions_of(author), author.text()
    place = author.chance.randrange(len(tools))
    own = tools[place]["function"]
    made = []
    for number in range(NUM):
        keys = own["parameters"]
        if number % 2:
            inner = shuffled_keys(keys["properties"], author.chance)
            keys = {**keys, "properties": inner}
        changed = {"type": "function", "function": {**own, "parameters": keys}}
        order = [*tools[:place], changed, *tools[place + 1 :]]
        made.append(chat_body(says("system", system), says("user", author.line()), tools=order))
    return made, Expected(("key_order",), f"tools.{place}")


def keys_of_a_declaration_shuffled(author: Author) -> tuple[Bodies, Expected]:
    tools, system = author.tools(), author.text()
    made = []
    for number in range(NUM):
        declared = [
            {"name": t.name, "description": t.description, "parameters": t.input_schema}
            for t in tools
        ]
        if number % 2:
            schema = tools[2].input_schema
            inner = shuffled_keys(schema["properties"], author.chance)
            declared[2]["parameters"] = {**schema, "properties": inner}
        made.append(
            gemini_body(
                content("user", author.line()),
                tools=[{"functionDeclarations": declared}],
                systemInstruction={"parts": [{"text": system}]},
            )
        )
    return made, Expected(("key_order",), "tools.2")


def growing_instructions(author: Author) -> tuple[Bodies, Expected]:
    text, made = author.text(), []
    for _ in range(NUM):
        made.append({"model": "m", "instructions": text, "input": author.line()})
        text += "\nRemember: " + author.line()
    return made, Expected(("growing_text",), "system.0")


def changing_image_before_a_document(author: Author) -> tuple[Bodies, Expected]:
    document, made = author.text(), []
    for number in range(NUM):
        blocks = [image(640 + number, 480), block(document), block(author.line())]
        made.append(messages_body(says("user", blocks)))
    return made, Expected(_VARIES, "messages.0")


def question_before_the_document(author: Author) -> tuple[Bodies, Expected]:
    document, system = author.text(), author.text(4)
    made = [
        gemini_body(
            content("user", author.line(), document, "Answer."),
            systemInstruction={"parts": [{"text": system}]},
        )
        for _ in range(NUM)
    ]
    return made, Expected(("nonce", "varying_text"), "messages.0")


def documents_in_another_order(author: Author) -> tuple[Bodies, Expected]:
    documents, made = [author.text(10) for _ in range(5)], []
    for _ in range(NUM):
        order = [*author.chance.sample(documents, 5), author.line()]
        parts = [{"type": "input_text", "text": text} for text in order]
        made.append({"model": "m", "instructions": "Answer.", "input": [says("user", parts)]})
    return made, Expected(("moved_text",), "messages")


def a_tool_that_comes_and_goes(author: Author) -> tuple[Bodies, Expected]:
    tools, system = tools_of(author), author.text()
    made = []
    ways = author.chance.sample(range(8), 8)
    for number in range(NUM):
        extra = [tool for bit, tool in enumerate(tools[:3]) if ways[number % 8] >> bit & 1]
        order = extra + tools[3:]
        made.append(messages_body(says("user", author.line()), tools=order, system=system))
    return made, Expected(("tool_set",), "tools")


def time_between_two_texts(author: Author) -> tuple[Bodies, Expected]:
    rules, rest, made = author.text(), author.text(), []
    for number in range(NUM):
        made.append(
            chat_body(
                says("system", rules),
                says("system", f"It is 12:00:{number:02}."),
                says("developer", rest),
                says("user", author.line()),
            )
        )
    return made, Expected(("nonce",), "system.1")


def blanks_that_come_and_go(author: Author) -> tuple[Bodies, Expected]:
    text, rest = author.text(), author.text()
    made = []
    for number in range(NUM):
        system = [block(text + " " * (number % 5)), block(rest)]
        made.append(messages_body(says("user", author.line()), system=system))
    return made, Expected(("varying_text",), "system.0")


def date_above_one_long_message(author: Author) -> tuple[Bodies, Expected]:
    """All in one text: the time, the rules and the question."""
    rules, made = author.text(), []
    for number in range(NUM):
        text = f"Now: 12:00:{number:02}\n{rules}\n{author.line()}"
        made.append(messages_body(says("user", text)))
    return made, Expected(_VARIES, "messages.0")


def id_above_a_raw_prompt(author: Author) -> tuple[Bodies, Expected]:
    rules, made = author.text(), []
    for _ in range(NUM):
        head = f"session {author.chance.getrandbits(64):x}"
        made.append({"model": "m", "prompt": f"{head}\n{rules}\n{author.line()}"})
    return made, Expected(_VARIES, "messages.0")


def reminder_in_the_first_message(author: Author) -> tuple[Bodies, Expected]:
    """A conversation through the Responses API whose first message tells the time of each turn."""
    question = author.text(10)
    said: Bodies = []
    made = []
    for number in range(NUM):
        first = [
            {"type": "input_text", "text": f"now {number}"},
            {"type": "input_text", "text": question},
        ]
        made.append({"model": "m", "instructions": "Help.", "input": [says("user", first), *said]})
        answer = [{"type": "output_text", "text": author.text(5)}]
        said = [*said, says("assistant", answer), says("user", author.line())]
    return made, Expected(("nonce",), "messages.0")


def summary_rewritten_each_turn(author: Author) -> tuple[Bodies, Expected]:
    """The older part of a conversation is summed up anew for every request."""
    system, said, made = author.text(4), [], []
    for _ in range(NUM):
        said.append(says("user", author.text(6)))
        summary = says("user", "So far: " + author.text(3))
        answer = says("assistant", "I see.")
        made.append(messages_body(summary, answer, *said, system=system))
        said.append(says("assistant", author.text(6)))
    return made, Expected(("nonce", "varying_text"), "messages.0")


FAULTY_BODIES: dict[str, Callable[[Author], tuple[Bodies, Expected]]] = {
    made.__name__: made
    for made in (
        date_in_a_tool,
        nonce_deep_in_a_long_text,
        tools_shuffled_behind_a_marker,
        keys_of_a_function_shuffled,
        keys_of_a_declaration_shuffled,
        growing_instructions,
        changing_image_before_a_document,
        question_before_the_document,
        documents_in_another_order,
        a_tool_that_comes_and_goes,
        time_between_two_texts,
        blanks_that_come_and_go,
        date_above_one_long_message,
        id_above_a_raw_prompt,
        reminder_in_the_first_message,
        summary_rewritten_each_turn,
    )
}
