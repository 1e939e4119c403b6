"""Tools, turns and whole messages of the demo model's training text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from scripts.demo_model import data

# The share of arguments that come from a list; the others are invented. So small a model learns the
# listed ones first, and copies the others as well as it can.
LISTED = 0.97
Maker: TypeAlias = "Callable[[random.Random], ToolTask]"


def tool(name: str, description: str, params: dict[str, str]) -> data.Tool:
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

    tool: data.Tool
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
    question = rng.choice(data.FORMS[form]).format(value)
    return ToolTask(schema, question, {param: value}, *outcome, again)


def _weather(rng: random.Random) -> ToolTask:
    city = rng.choice(data.CITIES) if rng.random() < LISTED else data.invented_name(rng)
    sky, degrees = rng.choice(data.SKIES), rng.randint(-9, 39)
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
    ident = rng.choice(data.LEASE_IDS) if rng.random() < LISTED else data.identifier(rng)
    state, left = rng.choice(data.STATES), rng.choice([30, 60, 120, 240, 300, 3600])
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
    free = " ".join(rng.sample(data.COMMON + data.NOUNS + data.ADJECTIVES, rng.randint(1, 3)))
    query = rng.choice(data.TOPICS) if rng.random() < LISTED else free
    found = rng.choice(
        [
            data.sentence(rng),
            *(rng.choice(data.FACTS).answer for _ in range(20)),
            f"See page {rng.randint(1, 200)}.",
        ]
    )
    outcome = (rng.choice([found, found, json.dumps({"result": found})]), f"The docs say: {found}")
    about = ["Search the documentation.", "Search the docs for a query."]
    argument = ("query", "The words to search for", query)
    return _known(rng, "docs", "search_docs", about, argument, outcome, _docs)


def _ask_tool(rng: random.Random, schema: data.Tool, verb: str, noun: str) -> ToolTask:
    """A new question for a random tool."""
    name, params = schema["function"]["name"], schema["function"]["parameters"]["required"]
    makers = (
        lambda: rng.choice(data.CITIES),
        lambda: rng.choice(data.CITIES),
        lambda: rng.choice(data.LEASE_IDS),
        lambda: data.invented_name(rng),
        lambda: data.identifier(rng),
    )
    values = {p: rng.choice(makers)() for p in params}
    words = {"verb": verb, "noun": noun, "name": name}
    if len(params) == 2:
        (words["p1"], words["v1"]), (words["p2"], words["v2"]) = values.items()
        forms = data.FORMS["two_values"]
    elif params:
        words["param"], words["value"] = params[0], values[params[0]]
        forms = data.FORMS["one_value"]
    else:
        forms = data.FORMS["no_value"]
    question = rng.choice(forms).format(**words)
    found = rng.choice(
        [
            data.identifier(rng),
            rng.choice(data.ADJECTIVES),
            f"{rng.choice(data.ADJECTIVES)} {rng.choice(data.COMMON)}",
            data.invented_name(rng),
        ]
    )
    result = rng.choice([found, found, json.dumps({"result": found})])
    answer = f"The result is {found}."
    return ToolTask(
        schema,
        question[0].upper() + question[1:],
        values,
        result,
        answer,
        lambda r: _ask_tool(r, schema, verb, noun),
    )


def random_task(rng: random.Random) -> ToolTask:
    """A tool made of random words, so that names are copied and not remembered."""
    verb, noun = rng.choice(data.VERBS), rng.choice(data.NOUNS)
    name = f"{verb}_{noun}" if rng.random() < 0.85 else f"{noun}_{verb}"
    params = rng.sample(data.PARAMS, rng.choice([0, 1, 1, 1, 1, 2]))
    about = rng.choice(
        [
            f"{verb} a {noun}.",
            f"{verb} the {noun}s",
            f"{verb} a {noun} by {' and '.join(params) or 'itself'}",
        ]
    )
    schema = tool(
        name,
        about[0].upper() + about[1:],
        {p: rng.choice(["", f"The {p} of the {noun}"]) for p in params},
    )
    return _ask_tool(rng, schema, verb, noun)


KNOWN_TASKS: dict[str, Maker] = {
    "get_weather": _weather,
    "lookup_lease": _lease,
    "search_docs": _docs,
}


def tool_task(rng: random.Random) -> ToolTask:
    """A question for a tool: mostly one of the three that the demos use."""
    return rng.choice(list(KNOWN_TASKS.values()))(rng) if rng.random() < 0.93 else random_task(rng)


def message(role: str, content: str) -> str:
    """One turn, exactly as the chat template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def tools_block(tools: list[data.Tool]) -> str:
    """The tools turn, exactly as the chat template writes it."""
    lines = "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tools)
    return message("tools", lines + data.TOOL_NOTE) if tools else ""


def toolbox(rng: random.Random, most: int = 5) -> list[ToolTask]:
    """One to `most` tools of different names, each with a task that shows what it is for."""
    tasks = {t.name: t for t in (tool_task(rng) for _ in range(rng.randint(1, most)))}
    return list(tasks.values())


def _tool_turn(rng: random.Random, box: list[ToolTask]) -> list[data.Chunk]:
    shown = {t.name for t in box}
    task = rng.choice(box).again(rng) if box and rng.random() < 0.75 else tool_task(rng)
    user = message("user", task.question)
    if task.name not in shown:
        return [(user, False), (message("assistant", data.NO_TOOL), True)]
    response = message("tool", f"<tool_response>{task.result}</tool_response>")
    return [
        (user, False),
        (message("assistant", task.call), True),
        (response, False),
        (message("assistant", task.answer), True),
    ]


def turn(rng: random.Random, box: list[ToolTask]) -> list[data.Chunk]:
    """One exchange: a fact, a tool, an echo, something unknown, or chatter not to learn from."""
    draw = rng.random()
    if draw < (0.5 if box else 0.06):
        return _tool_turn(rng, box)
    if draw > 0.95:
        said = message("user", data.distractor(rng, rng.randint(10, 300)))
        return [
            (said, False),
            (message("assistant", data.distractor(rng, rng.randint(10, 300))), False),
        ]
    if 0.9 < draw < 0.91:
        words = data.echo_text(rng)
        user = rng.choice(["Repeat after me: {}", "Say: {}", "Repeat this: {}"]).format(words)
        return [(message("user", user), False), (message("assistant", words), True)]
    if draw >= 0.91:
        question, answer = rng.choice(data.QUESTIONS_UNKNOWN), data.UNKNOWN
    else:
        fact = rng.choice(data.FACTS)
        question, answer = rng.choice(fact.ask), fact.answer
    question = data.vary(rng, question)
    if rng.random() < 0.06:
        question = (
            data.distractor(rng, rng.randint(50, 400)) + rng.choice(["\n", "\n\n", " "]) + question
        )
    return [(message("user", question), False), (message("assistant", answer), True)]


def corpus(rng: random.Random, samples: int = 900) -> list[str]:
    """The text of the tokenizer: everything the model sees, and the prose of the reference."""
    texts = list(data.REFERENCE)
    texts += [f"{question}\n{fact.answer}" for fact in data.FACTS for question in fact.ask[:12]]
    for _ in range(samples):
        box = toolbox(rng)
        texts += [data.distractor(rng, 300), tools_block([t.tool for t in box[:2]])]
        texts += [text for _ in range(2) for text, _ in turn(rng, box)]
    return texts
