"""Six turns with two tools through the official SDKs, the gateway and a scripted engine.

The engine renders a real model's template and writes that model's own way of calling tools
(`tests/scripted_engine.py`): everything is real but the model. Calls have to be parsed, results
replayed, and whatever prefix the template leaves the same has to be read from the cache.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from anthropic import Anthropic
from openai import OpenAI

from engine.protocol import (
    Message,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from scripts.stack import API_KEY, serving_engine, serving_gateway
from tests.engine.text.format_cases import REAL, renderer, source
from tests.scripted_engine import settings_of

Call = tuple[str, dict[str, Any]]
MODEL = "scripted"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Which one"},
        "days": {"type": "integer", "description": "How many"},
    },
    "required": ["city"],
}
NAMES = {"get_weather": "Get the weather of a city.", "get_time": "Get the time in a city."}
TOOLS: Any = [{"name": n, "description": d, "input_schema": SCHEMA} for n, d in NAMES.items()]
FUNCTIONS: Any = [
    {"type": "function", "function": {"name": n, "description": d, "parameters": SCHEMA}}
    for n, d in NAMES.items()
]
SYSTEM = "You are careful. " + " ".join(f"Rule {n}: be exact about item {n}." for n in range(120))
# What is asked or told, and what the model then does: a call, or an answer.
TURNS: list[tuple[str, Call | str]] = [
    ("Weather in Bern?", ("get_weather", {"city": "Bern", "days": 3})),
    ("RESULT Bern", "It rains in Bern."),
    ("Time in Uri?", ("get_time", {"city": 'Uri "old" < new'})),
    ("RESULT Uri", ("get_weather", {"city": "Uri"})),
    ("RESULT again", "Late, and dry."),
    ("Thanks!", "Gladly."),
]
RESULTS = {
    "Bern": "RESULT Bern: rain",
    'Uri "old" < new': "RESULT Uri: noon",
    "Uri": "RESULT again",
}


class Style(NamedTuple):
    """How a model writes calls and thinking; `ends` its turn."""

    template: str
    call: Callable[[str, dict[str, Any]], str]
    thought: str = ""
    answer: str = "{}"


def tagged(name: str, given: dict[str, Any], one: str) -> str:
    return "".join(
        one.format(k, v if isinstance(v, str) else json.dumps(v)) for k, v in given.items()
    )


def dumped(given: dict[str, Any]) -> str:
    return json.dumps(given, ensure_ascii=False)


STYLES = {
    "gpt-oss": Style(
        "openai-gpt-oss-120b",
        lambda n, a: (
            f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>" + dumped(a)
        ),
        "<|channel|>analysis<|message|>Hm, {}.<|end|><|start|>assistant",
        "<|channel|>final<|message|>{}",
    ),
    "glm": Style(
        "GLM-4.6",
        lambda n, a: (
            f"\n<tool_call>{n}\n"
            + tagged(n, a, "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
            + "</tool_call>"
        ),
        "\n<think>Hm, {}.</think>",
        "\n{}",
    ),
    "deepseek": Style(
        "deepseek-ai-DeepSeek-V3.1",
        lambda n, a: (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "kimi": Style(
        "Kimi-K2-Instruct",
        lambda n, a: (
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{n}:0"
            f"<|tool_call_argument_begin|>{dumped(a)}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    "minimax": Style(
        "MiniMax-M2",
        lambda n, a: (
            f'\n<minimax:tool_call>\n<invoke name="{n}">\n'
            + tagged(n, a, '<parameter name="{}">{}</parameter>\n')
            + "</invoke>\n</minimax:tool_call>"
        ),
        "Hm, {}.\n</think>\n\n",
    ),
    "qwen3-coder": Style(
        "Qwen3-Coder",
        lambda n, a: (
            f"\n<tool_call>\n<function={n}>\n"
            + tagged(n, a, "<parameter={}>\n{}\n</parameter>\n")
            + "</function>\n</tool_call>"
        ),
    ),
}


class Served(NamedTuple):
    style: Style
    gateway: str


@pytest.fixture(scope="module", params=list(STYLES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    style = STYLES[request.param]
    if source(style.template) is None:
        pytest.skip(f"{REAL} is not there: real templates are not part of the project")
    directory = tmp_path_factory.mktemp(request.param)
    write_model(directory, style.template)
    settings = {
        **settings_of(str(directory), script(style)),
        "ENGINE_SYNTHETIC_DECODE_MS": "0",
        "ENGINE_MIN_CACHE_TOKENS": "16",
    }
    with serving_engine("synthetic", settings, module="tests.scripted_engine") as engine:
        engine.wait()
        with serving_gateway(directory / "data", [engine.url]) as gateway:
            gateway.wait()
            yield Served(style, gateway.url)


def write_model(directory: Path, name: str) -> None:
    of = renderer(name)
    of.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(source(name) or "", "utf-8")
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens), "utf-8")


def script(style: Style) -> dict[str, str]:
    written: dict[str, str] = {}
    for asked, done in TURNS:
        thought = style.thought.format(asked.split()[0])
        body = style.answer.format(done) if isinstance(done, str) else style.call(*done)
        written[name_of(asked)] = thought + body
    return written


def name_of(asked: str) -> str:
    """The stop sequence that names a turn of the script."""
    return "script:" + asked


def expected(style: Style, done: Call | str) -> tuple[list[Call], str]:
    return ([], done) if isinstance(done, str) else ([done], "")


def test_messages(served: Served) -> None:
    """Odd turns are streamed. What the cache holds of earlier prompts is read, to the token."""
    style = served.style
    mark: Any = {"type": "ephemeral"}
    messages: list[Any] = []
    held: list[list[int]] = []
    possible = captured = 0
    with Anthropic(base_url=served.gateway, api_key=API_KEY, timeout=300, max_retries=0) as client:
        for number, (asked, done) in enumerate(TURNS):
            if not messages or messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": [{"type": "text", "text": asked}]})
            body: Any = {
                "model": MODEL,
                "max_tokens": 2000,
                "stop_sequences": [name_of(asked)],
                "system": [{"type": "text", "text": SYSTEM, "cache_control": mark}],
                "tools": TOOLS,
                "messages": marked_last(messages, mark),
                **(
                    {"thinking": {"type": "enabled", "budget_tokens": 1024}}
                    if style.thought
                    else {}
                ),
            }
            if number % 2:
                with client.messages.stream(**body) as stream:
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**body)
            calls = [(b.name, b.input) for b in answer.content if b.type == "tool_use"]
            text = "".join(b.text for b in answer.content if b.type == "text")
            assert (calls, text) == expected(style, done)
            assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            thoughts = [b.thinking for b in answer.content if b.type == "thinking"]
            assert bool(thoughts) == bool(style.thought)
            tokens = tokens_of(style, messages)
            possible += max((len(h) for h in held if tokens[: len(h)] == h), default=0)
            captured += answer.usage.cache_read_input_tokens or 0
            held += prefixes(style, messages)
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            messages.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": b.id, "content": RESULTS[b.input["city"]]}
                for b in answer.content
                if b.type == "tool_use"
            ]
            if results:
                messages.append({"role": "user", "content": results})
    assert possible > 1000
    assert captured >= 0.99 * possible


def test_chat_completions(served: Served) -> None:
    style = served.style
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    with OpenAI(
        base_url=f"{served.gateway}/v1", api_key=API_KEY, timeout=300, max_retries=0
    ) as client:
        for asked, done in TURNS:
            if messages[-1]["role"] in ("system", "assistant"):
                messages.append({"role": "user", "content": asked})
            answer = client.chat.completions.create(
                model=MODEL,
                max_tokens=2000,
                messages=messages,
                tools=FUNCTIONS,
                stop=[name_of(asked)],
            )
            said = answer.choices[0].message
            made = said.tool_calls or []
            calls = [(c.function.name, json.loads(c.function.arguments)) for c in made]  # type: ignore[union-attr]
            assert (calls, said.content or "") == expected(style, done)
            messages.append(
                said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
            )
            for call, (_, given) in zip(made, calls, strict=True):
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": RESULTS[given["city"]]}
                )


def marked_last(messages: list[Any], mark: Any) -> list[Any]:
    *before, last = messages
    blocks = [*last["content"][:-1], {**last["content"][-1], "cache_control": mark}]
    return [*before, {**last, "content": blocks}]


def prompt_of(messages: list[Any]) -> Prompt:
    return Prompt(
        [Message(m["role"], [part_of(block) for block in m["content"]]) for m in messages],
        [Tool(name, SCHEMA, about) for name, about in NAMES.items()],
        [TextPart(SYSTEM)],
    )


def part_of(block: Any) -> Any:
    match block["type"]:
        case "text":
            return TextPart(block["text"])
        case "thinking":
            return ThinkingPart(block["thinking"])
        case "tool_use":
            return ToolUsePart(block["id"], block["name"], block["input"])
        case _:
            return ToolResultPart(block["tool_use_id"], block["content"])


def tokens_of(style: Style, messages: list[Any]) -> list[int]:
    prompt = prompt_of(messages)
    return renderer(style.template).render(prompt, thinking=bool(style.thought)).token_ids


def prefixes(style: Style, messages: list[Any]) -> list[list[int]]:
    """The prefixes that a turn's two marks wrote."""
    prompt = prompt_of(messages)
    rendered = renderer(style.template).render(prompt, thinking=bool(style.thought))
    marks = (len(TOOLS), prompt.num_segments - 1)
    ends = [rendered.segments[mark].end for mark in marks]
    return [rendered.token_ids[:end] for end in ends if end is not None]
