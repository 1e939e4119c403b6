"""The conversation that every client here holds, and what the usage of its turns must be.

Nothing of Holdfast is imported: what these tests know of it is a URL and a key.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import uuid4

MODEL = "holdfast-demo"
MIN_TURNS = 6
MIN_CACHED = 1024
MAX_SCAFFOLD = 8
MAX_TOKENS = 60
EPHEMERAL = {"type": "ephemeral"}
# The model answers some with a call and some without; the conversation goes on either way.
QUESTIONS = (
    "What is the weather in Oslo?",
    "What is a lease?",
    "What is an entry?",
    "What is the weather in Paris?",
    "What is a scope?",
    "What is an epoch?",
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The name of the city"}},
    "required": ["city"],
}
ABOUT_WEATHER = "Get the current weather in a city."
ANTHROPIC_TOOL = {"name": "get_weather", "description": ABOUT_WEATHER, "input_schema": CITY}
OPENAI_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": ABOUT_WEATHER, "parameters": CITY},
}


class Service(NamedTuple):
    """A gateway with a native engine that serves the demo model."""

    url: str
    key: str


class Turn(NamedTuple):
    """One response's usage, in tokens: the whole prompt, what was read of it, what was written."""

    prompt: int
    read: int
    written: int


def handbook() -> str:
    """A system prompt of some 1,700 tokens that nobody has sent before."""
    rules = (f"Rule {i}: the staff must file form {i * 7} before noon." for i in range(80))
    return f"Handbook, edition {uuid4().hex}. " + " ".join(rules)


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return "sunny" if city else "unknown"


def assert_append_only(turns: Sequence[Turn]) -> None:
    """read(t) = read(t-1) + creation(t-1), from nothing on, and nothing is read twice."""
    print(*turns, sep="\n")
    assert len(turns) >= MIN_TURNS
    assert turns[0].read == 0
    assert turns[0].written >= MIN_CACHED
    for before, turn in pairwise(turns):
        assert turn.read == before.read + before.written
        assert turn.written > 0
        assert turn.prompt > before.prompt
    # What follows the last breakpoint are the template's own few words before the answer.
    assert all(0 < turn.prompt - turn.read - turn.written <= MAX_SCAFFOLD for turn in turns)
