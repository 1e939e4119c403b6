"""Shapes of traffic in which nothing is wrong, by seed: prompts, and bodies of all dialects."""

import json
from collections.abc import Callable
from typing import Any

from engine.protocol import Message, Prompt, TextPart
from tests.gateway.advice.bodies import (
    MARK,
    NUM,
    Bodies,
    Body,
    block,
    chat_body,
    functions_of,
    image,
    messages_body,
    says,
    tools_of,
)
from tests.gateway.advice.shapes import Author, Sent, assistant, at, single, user


def conversations(author: Author) -> list[Sent]:
    tools = author.tools()
    text = author.text()
    sent = []
    for talk in range(author.chance.randint(2, 5)):
        messages: list[Message] = []
        for turn in range(author.chance.randint(4, 14)):
            messages = [*messages, user(author.line())]
            prompt = Prompt(messages, tools=tools, system=[TextPart(text)])
            sent.append(Sent(at(talk * 40 + turn), prompt))
            messages = [*messages, assistant(author.text(3))]
    return sent


def documents(author: Author) -> list[Sent]:
    text = author.text()
    sent = []
    for number in range(author.chance.randint(4, 9)):
        document = author.text(24)
        for question in range(author.chance.randint(1, 5)):
            message = user(document, author.line())
            sent.append(Sent(at(number * 6 + question), Prompt([message], system=[TextPart(text)])))
    return sent


def released(author: Author) -> list[Sent]:
    """The system prompt is changed once."""
    tools = author.tools()
    text = author.text()
    sent = []
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
    tools = author.tools()
    text = author.text()
    sent = []
    messages: list[Message] = []
    for number in range(author.chance.randint(24, 60)):
        if len(messages) > 20:
            messages = [user("Summary: " + author.text(6)), assistant("Understood.")]
        messages = [*messages, user(author.line())]
        sent.append(Sent(at(number), Prompt(messages, tools=tools, system=[TextPart(text)])))
        messages = [*messages, assistant(author.text(3))]
    return sent


def forked(author: Author) -> list[Sent]:
    """Some turns are asked again, or in other words."""
    text = author.text()
    sent = []
    messages: list[Message] = []
    for number in range(author.chance.randint(10, 24)):
        if messages and author.chance.random() < 0.25:
            messages = messages[:-2]
        messages = [*messages, user(author.line())]
        sent.append(Sent(at(number), Prompt(messages, system=[TextPart(text)])))
        messages = [*messages, assistant(author.text(3))]
    return sent


def split_test(author: Author) -> list[Sent]:
    """Two wordings of one prompt, chosen by chance."""
    text, tools = author.text(), author.tools()
    wordings = [f"Be polite.\n{text}", f"Be brief.\n{text}"]
    return [
        Sent(at(number), single(author, tools, author.chance.choice(wordings)))
        for number in range(author.chance.randint(24, 60))
    ]


def parameters_that_change(author: Author) -> Bodies:
    tools = tools_of(author)
    system = author.text()
    ways: list[Body] = [
        {"tool_choice": {"type": "auto"}, "metadata": {"user_id": "user-0"}},
        {"tool_choice": {"type": "any"}, "temperature": 0.5},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096},
        {"stream": True, "stop_sequences": ["stop"], "metadata": {"user_id": "user-3"}},
    ]
    return [
        messages_body(says("user", author.line()), tools=tools, system=system) | ways[number % 4]
        for number in range(NUM)
    ]


def other_images_of_one_size(author: Author) -> Bodies:
    """The model is shown the same words in their place."""
    document = author.text()
    return [
        messages_body(
            says("user", [image(640, 480, bytes([number])), block(document), block("Go.")])
        )
        for number in range(NUM)
    ]


def moving_markers(author: Author) -> Bodies:
    system = author.text()
    messages = []
    bodies = []
    for _ in range(NUM):
        messages.append(says("user", [block(author.line())]))
        last = {**messages[-1], "content": [{**messages[-1]["content"][0], "cache_control": MARK}]}
        bodies.append(messages_body(*messages[:-1], last, system=system))
        messages.append(says("assistant", author.text(2)))
    return bodies


def agent_of_functions(author: Author) -> Bodies:
    """A growing conversation of calls; arguments are spelt with and without blanks."""
    tools = functions_of(author)
    bodies = []
    messages: Bodies = [says("system", author.text()), says("user", author.line())]
    for number in range(NUM):
        bodies.append(chat_body(*messages, tools=tools))
        call = f"call_{number}"
        spaces = (",", ":") if number % 2 else (", ", ": ")
        arguments = json.dumps({"q": author.words(4), "n": number}, separators=spaces)
        function = {"name": tools[0]["function"]["name"], "arguments": arguments}
        calls = [{"id": call, "type": "function", "function": function}]
        messages = [
            *messages,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call, "content": author.text(3)},
        ]
    return bodies


def a_tool_is_added_once(author: Author) -> Bodies:
    tools = tools_of(author)
    system = author.text()
    return [
        messages_body(
            says("user", author.line()),
            tools=tools if number >= NUM // 2 else tools[:-1],
            system=system,
        )
        for number in range(NUM)
    ]


def _named(*makes: Callable[[Author], Any]) -> dict[str, Callable[[Author], Any]]:
    return {make.__name__: make for make in makes}


SOUND = _named(conversations, documents, released, two_agents, compacted) | _named(
    forked, split_test
)
SOUND_BODIES = _named(
    parameters_that_change,
    other_images_of_one_size,
    moving_markers,
    agent_of_functions,
    a_tool_is_added_once,
)
