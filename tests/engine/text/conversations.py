"""Random conversations, and the real chat templates beside this project's own."""

import os
from pathlib import Path
from random import Random
from typing import Any

from engine.protocol import (
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)

ROOT = Path(__file__).resolve().parents[3]
OWN = Path(__file__).with_name("chat_templates")
REAL = Path(os.environ.get("HOLDFAST_TEMPLATES") or ROOT.parent / "shared" / "templates")
WHY_NOT = f"no real chat templates: set HOLDFAST_TEMPLATES, or put them into {REAL.name}/ beside"

WORDS = (
    "rain",
    "Weather in Bern",
    "12 °C",
    "the",
    "no",
    '"quoted"',
    "it's",
    "x = {'a': [1, 2]}",
    "Zürich",
    "a.b.c()",
    "<b>bold</b>",
    "|",
    "日本",
    "😀",
    "def f(x):\n    return x",
    "1,234.5",
    "...",
    "—",
    "end.",
    "tabs\tand",
    "\n\n",
    "  ",
    "- item\n",
    "https://example.org/?q=1&r=2",
    "}}",
    '"}',
    "`code`",
)


def template_paths() -> list[Path]:
    return [*sorted(OWN.glob("*.jinja")), *sorted(REAL.glob("*.jinja"))]


def call_template_paths() -> list[Path]:
    """This project's templates of further ways to write calls."""
    return sorted(OWN.with_name("call_templates").glob("*.jinja"))


class Conversations:
    """Draws prompts that a chat client could send; one seed, one sequence."""

    def __init__(self, seed: int, words: tuple[str, ...] = WORDS) -> None:
        self._random = Random(seed)
        self._words = words

    def text(self, most: int = 12) -> str:
        drawn = self._random.choices(self._words, k=self._random.randint(1, most))
        return self._random.choice([" ", " ", ""]).join(drawn).strip() or "rain"

    def tools(self, most: int = 5) -> list[Tool]:
        return [self._tool(index) for index in range(self._random.randint(0, most))]

    def prompt(self, *, num_turns: int, tools: list[Tool], has_system: bool = True) -> Prompt:
        system = [TextPart(self.text()) for _ in range(self._random.randint(1, 2))]
        messages: list[Message] = []
        for turn in range(num_turns):
            messages.append(Message("user", [TextPart(f"{turn}: {self.text()}")]))
            if turn < num_turns - 1:
                messages.extend(self._answer(turn, tools))
        return Prompt(messages, tools, system if has_system else [])

    def _answer(self, turn: int, tools: list[Tool]) -> list[Message]:
        draw = self._random.random
        messages: list[Message] = []
        if tools and draw() < 0.6:
            said: list[Part] = [ThinkingPart(self.text())] if draw() < 0.5 else []
            said += [TextPart(self.text())] if draw() < 0.5 else []
            call = ToolUsePart(f"toolu_{turn:021}", self._random.choice(tools).name, self._input())
            result = ToolResultPart(call.id, self.text(), is_error=draw() < 0.1)
            messages = [Message("assistant", [*said, call]), Message("user", [result])]
        end: list[Part] = [ThinkingPart(self.text())] if draw() < 0.5 else []
        return [*messages, Message("assistant", [*end, TextPart(self.text())])]

    def _tool(self, index: int) -> Tool:
        properties: dict[str, Any] = {
            f"field_{number}": {
                "type": self._random.choice(["string", "integer", "boolean"]),
                "description": self.text(5),
            }
            for number in range(self._random.randint(0, 3))
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        return Tool(f"tool_{index}", schema, self.text(6))

    def _input(self) -> dict[str, Any]:
        values: list[Any] = [self.text(4), 3, 2.5, True, None, [1, "a"], {"b": {"c": []}}, ""]
        return {f"k{n}": self._random.choice(values) for n in range(self._random.randint(0, 3))}
