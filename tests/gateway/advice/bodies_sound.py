"""Requests of all dialects in which nothing is wrong, by seed."""

import json
from collections.abc import Callable

from tests.gateway.advice.bodies import (
    MARK,
    NUM,
    Bodies,
    Body,
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
from tests.gateway.advice.shapes import Author


def users_and_metadata(author: Author) -> Bodies:
    tools, system = tools_of(author), author.text()
    return [
        messages_body(
            says("user", author.line()),
            tools=tools,
            system=system,
            metadata={"user_id": f"user-{number}"},
            temperature=number / NUM,
            stop_sequences=[f"stop {number}"],
        )
        for number in range(NUM)
    ]


def choices_and_thinking(author: Author) -> Bodies:
    tools, system = tools_of(author), author.text()
    ways: list[Body] = [
        {"tool_choice": {"type": "auto"}},
        {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096},
        {"stream": True},
    ]
    return [
        messages_body(says("user", author.line()), tools=tools, system=system) | ways[number % 4]
        for number in range(NUM)
    ]


def chat_parameters(author: Author) -> Bodies:
    system = author.text()
    return [
        chat_body(
            says("system", system),
            says("user", author.line()),
            user=f"user-{number}",
            seed=number,
            temperature=0.5,
            metadata={"run": str(number)},
            response_format={"type": "text"} if number % 2 else None,
        )
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


def images_at_the_end(author: Author) -> Bodies:
    system = author.text()
    return [
        messages_body(says("user", [block(author.line()), image(640 + n, 480)]), system=system)
        for n in range(NUM)
    ]


def moving_markers(author: Author) -> Bodies:
    system, said, made = author.text(), [], []
    for _ in range(NUM):
        said.append(says("user", [block(author.line())]))
        last = {**said[-1], "content": [{**said[-1]["content"][0], "cache_control": MARK}]}
        made.append(messages_body(*said[:-1], last, system=system))
        said.append(says("assistant", author.text(2)))
    return made


def strings_and_blocks(author: Author) -> Bodies:
    """One content written in two ways."""
    system, document = author.text(), author.text()
    return [
        messages_body(
            says("user", [block(document), block(author.line())]),
            system=system if number % 2 else [block(system)],
        )
        for number in range(NUM)
    ]


def agent_of_functions(author: Author) -> Bodies:
    """A growing conversation of calls; arguments are spelt with and without blanks."""
    tools, made = functions_of(author), []
    said: Bodies = [says("system", author.text()), says("user", author.line())]
    for number in range(NUM):
        made.append(chat_body(*said, tools=tools))
        call, spaces = f"call_{number}", (",", ":") if number % 2 else (", ", ": ")
        arguments = json.dumps({"q": author.words(4), "n": number}, separators=spaces)
        function = {"name": tools[0]["function"]["name"], "arguments": arguments}
        calls = [{"id": call, "type": "function", "function": function}]
        said = [
            *said,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call, "content": author.text(3)},
        ]
    return made


def agent_of_declarations(author: Author) -> Bodies:
    """The same of Google's API, whose calls have no ids."""
    tools, system, made = author.tools(), author.text(), []
    declared = [
        {"name": t.name, "description": t.description, "parameters": t.input_schema} for t in tools
    ]
    said = [content("user", author.line())]
    for number in range(NUM):
        made.append(
            gemini_body(
                *said,
                tools=[{"functionDeclarations": declared}],
                systemInstruction={"parts": [{"text": system}]},
                generationConfig={"temperature": number / NUM},
            )
        )
        call = {"functionCall": {"name": tools[0].name, "args": {"q": author.words(4)}}}
        told = {"name": tools[0].name, "response": {"out": author.text(3)}}
        said = [*said, content("model", call), content("user", {"functionResponse": told})]
    return made


def agent_of_items(author: Author) -> Bodies:
    """The same of the Responses API, with reasoning effort that changes."""
    tools = author.tools()
    declared = [
        {"type": "function", "name": t.name, "description": t.description, "parameters": schema}
        for t in tools
        for schema in [t.input_schema]
    ]
    system, made = author.text(), []
    said: Bodies = [says("user", author.line())]
    for number in range(NUM):
        effort = "low" if number % 2 else "high"
        made.append(
            {
                "model": "m",
                "instructions": system,
                "input": said,
                "tools": declared,
                "reasoning": {"effort": effort},
            }
        )
        call = f"call_{number}"
        arguments = json.dumps({"q": author.words(3)})
        asked = {"type": "function_call", "call_id": call, "name": tools[0].name}
        told = {"type": "function_call_output", "call_id": call, "output": author.text(3)}
        said = [*said, {**asked, "arguments": arguments}, told]
    return made


def found_documents(author: Author) -> Bodies:
    """Other documents for each question, behind the same rules."""
    system = author.text()
    return [
        chat_body(says("system", system), says("user", f"{author.text(12)}\n\n{author.line()}"))
        for _ in range(NUM)
    ]


def raw_prompts(author: Author) -> Bodies:
    rules = author.text()
    return [{"model": "m", "prompt": f"{rules}\n{author.line()}"} for _ in range(NUM)]


def one_document_many_questions(author: Author) -> Bodies:
    document = author.text(60)
    return [messages_body(says("user", f"{document}\n\n{author.line()}")) for _ in range(NUM)]


def a_tool_is_added_once(author: Author) -> Bodies:
    tools, system = tools_of(author), author.text()
    return [
        messages_body(
            says("user", author.line()),
            tools=tools if number >= NUM // 2 else tools[:-1],
            system=system,
        )
        for number in range(NUM)
    ]


SOUND_BODIES: dict[str, Callable[[Author], Bodies]] = {
    made.__name__: made
    for made in (
        users_and_metadata,
        choices_and_thinking,
        chat_parameters,
        other_images_of_one_size,
        images_at_the_end,
        moving_markers,
        strings_and_blocks,
        agent_of_functions,
        agent_of_declarations,
        agent_of_items,
        found_documents,
        raw_prompts,
        one_document_many_questions,
        a_tool_is_added_once,
    )
}
