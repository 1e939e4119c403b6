"""Random conversations, and a long one in which every turn reads what came before."""

from itertools import accumulate
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

WORDS = (
    *"rain,Weather in Bern,12 °C,the,no,it's,Zürich,a.b.c(),<b>bold</b>,日本,😀,|,}}".split(","),
    *'"quoted",—,end.,tabs\tand,\n\n,  ,- item\n,https://example.org/?q=1&r=2,"},`code`'.split(","),
    *("1,234.5", "...", "x = {'a': [1, 2]}", "def f(x):\n    return x"),
)
TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}, "Weather."),
    Tool("get_time", {"type": "object", "properties": {"zone": {"type": "string"}}}, "The time."),
]
SYSTEM = TextPart("You are a careful assistant. You answer in whole sentences, and briefly.")


def user(*texts: str) -> Message:
    return Message("user", [TextPart(text) for text in texts])


class Conversations:
    """Draws prompts that a chat client could send; one seed, one sequence."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def text(self, most: int = 12) -> str:
        drawn = self._random.choices(WORDS, k=self._random.randint(1, most))
        return self._random.choice([" ", " ", ""]).join(drawn).strip() or "rain"

    def tools(self) -> list[Tool]:
        return [self._tool(index) for index in range(self._random.randint(0, 5))]

    def prompt(self, *, num_turns: int, tools: list[Tool], has_system: bool) -> Prompt:
        system = [TextPart(self.text()) for _ in range(self._random.randint(1, 2))]
        messages: list[Message] = []
        for turn in range(num_turns):
            messages.append(user(f"{turn}: {self.text()}"))
            if turn < num_turns - 1:
                messages.extend(self._answer(turn, tools))
        return Prompt(messages, tools, system if has_system else [])

    def _answer(self, turn: int, tools: list[Tool]) -> list[Message]:
        draw = self._random.random
        messages: list[Message] = []
        if tools and draw() < 0.6:
            parts: list[Part] = [ThinkingPart(self.text())] if draw() < 0.5 else []
            parts += [TextPart(self.text())] if draw() < 0.5 else []
            call = ToolUsePart(f"toolu_{turn:021}", self._random.choice(tools).name, self._input())
            result = ToolResultPart(call.id, self.text(), is_error=draw() < 0.1)
            messages = [Message("assistant", [*parts, call]), Message("user", [result])]
        end: list[Part] = [ThinkingPart(self.text())] if draw() < 0.5 else []
        return [*messages, Message("assistant", [*end, TextPart(self.text())])]

    def _tool(self, index: int) -> Tool:
        types = ["string", "integer", "boolean"]
        properties: dict[str, Any] = {
            f"field_{n}": {"type": self._random.choice(types), "description": self.text(5)}
            for n in range(self._random.randint(0, 3))
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        return Tool(f"tool_{index}", schema, self.text(6))

    def _input(self) -> dict[str, Any]:
        values: list[Any] = [self.text(4), 3, 2.5, True, None, [1, "a"], {"b": {"c": []}}, ""]
        return {f"k{n}": self._random.choice(values) for n in range(self._random.randint(0, 3))}


def long_conversation(num_turns: int, tools: list[Tool]) -> list[Prompt]:
    """The prompts of one conversation, each with all that came before."""
    messages: list[Message] = []
    prompts: list[Prompt] = []
    for turn in range(num_turns):
        messages.append(user(f"Question {turn}: how is it in Bern, then?"))
        prompts.append(Prompt(list(messages), tools, [SYSTEM]))
        if tools and turn % 2:
            call = ToolUsePart(f"toolu_{turn:021}", "get_weather", {"city": f"Bern {turn}"})
            thought = ThinkingPart(f"I need the tool for {turn}.")
            messages.append(Message("assistant", [thought, call]))
            messages.append(Message("user", [ToolResultPart(call.id, f"Rain, {turn} degrees.")]))
            prompts.append(Prompt(list(messages), tools, [SYSTEM]))
        thought = ThinkingPart(f"That is wet, {turn}.")
        messages.append(Message("assistant", [thought, TextPart(f"It rains at {turn} degrees.")]))
    return prompts[:num_turns]


def marked_segments(prompt: Prompt) -> list[int]:
    """Marked as agents mark: the tools, the system prompt, the last two turns of the user."""
    num_first = len(prompt.tools) + len(prompt.system)
    ends = list(accumulate((len(m.parts) for m in prompt.messages), initial=num_first - 1))[1:]
    users = [end for end, m in zip(ends, prompt.messages, strict=True) if m.role == "user"]
    marks = {num_first - 1, *users[-2:]} | ({len(prompt.tools) - 1} if prompt.tools else set())
    return sorted(marks)
