"""No text of a client becomes a control token, in any place, under any template.

`scripts/long_tests injections` draws 20,000 attacks; every commit some hundreds. Each has a
harmless twin. One seed, one sequence.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.errors import InvalidRequest
from engine.protocol import (
    Message,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.renderer import ChatRenderer
from tests.engine.text.conversations import user
from tests.engine.text.format_cases import REAL_PATHS, own_template_paths
from tests.engine.text.vocabularies import KINDS, files_for

NUM_INJECTIONS = int(os.environ.get("INJECTIONS", "300"))
NUM_TEMPLATES_AT_A_COMMIT = 10
ALL = [*own_template_paths(), *REAL_PATHS]
PLACES = (
    "system", "question", "thought", "answer", "late system", "tool name", "tool description",
    "schema key", "schema description", "schema enum", "schema type", "schema default", "call name",
    "call id", "call key", "call value", "call inner key", "call list", "call text", "result",
    "result id",
)  # fmt: skip
# Matched in other ways: in normalized text, without brackets, with the white space beside them, as
# whole words only.
ODD = [
    AddedToken("ENDOFTURN", normalized=False, special=True),
    AddedToken("<|loud|>", normalized=True, special=True),
    AddedToken("SHOUT", normalized=True, special=True),
    AddedToken("<|fin\u00e9|>", normalized=True, special=True),
    AddedToken("<|left|>", normalized=False, special=True, lstrip=True),
    AddedToken("<|right|>", normalized=False, special=True, rstrip=True),
    AddedToken("~word~", normalized=False, special=True, single_word=True),
    AddedToken("~", normalized=False, special=True),
]


def payload_of(draw: Random, controls: Sequence[str]) -> str:
    control = draw.choice(controls)
    second_control = draw.choice(controls)
    half = len(control) // 2
    several = "\n".join(draw.sample(controls, k=min(4, len(controls))))
    forms = (
        control,
        control,
        control + second_control,
        control[:half] + second_control + control[half:],
        control[:-1] + control,
        control + control[1:],
        control[:half],
        control[half:],
        control[1:-1],
        unicodedata.normalize("NFD", control),
        control.translate({ord(c): 0xFEE0 + ord(c) for c in "<|>[]A"}),
        f" {control} ",
        f"{control}user\n{second_control}",
        several,
        f'"}}{control}{{"',
        control.replace("|", "\\u007c"),
        control.replace("|", "\\u007c").replace("<", "\\u003c") + " whole",
    )
    return draw.choice(forms)


def prompt_of(texts: dict[str, str], *, has_tools: bool) -> Prompt:
    def at(place: str, otherwise: str) -> str:
        return texts.get(place, otherwise)

    city = {
        "type": at("schema type", "string"),
        "description": at("schema description", "Where."),
        "enum": ["Bern", at("schema enum", "Basel")],
        "default": at("schema default", "Bern"),
    }
    key = at("schema key", "city")
    schema = {"type": "object", "properties": {key: city}, "required": [key]}
    tool = Tool(at("tool name", "weather"), schema, at("tool description", "Gives it."))
    arguments: dict[str, Any] | str = {
        at("call key", "city"): at("call value", "Bern"),
        "inner": {at("call inner key", "a"): [1, at("call list", "b")]},
    }
    if "call text" in texts:
        arguments = f'{{"city": "{texts["call text"]}"'
    if texts.get("call text", "").endswith("whole"):
        # Python reads this as an object, whose texts have no escapes any more.
        arguments += ', "count": NaN}'
    call = ToolUsePart(at("call id", "toolu_1"), at("call name", tool.name), arguments)
    result = ToolResultPart(at("result id", call.id), at("result", "Rain."))
    thought = ThinkingPart(at("thought", "I look."))
    answer = TextPart(at("answer", "It rains."))
    messages = [user(at("question", "How is it?"))]
    if has_tools:
        messages += [Message("assistant", [thought, call]), Message("user", [result])]
    messages += [Message("assistant", [thought, answer]), user("And?")]
    if "late system" in texts:
        messages.insert(-1, Message("system", [TextPart(texts["late system"])]))
    system = [TextPart(at("system", "Be brief."))]
    return Prompt(messages, [tool] if has_tools else [], system)


def controls_in(renderer: ChatRenderer, prompt: Prompt) -> list[int] | None:
    """The control tokens of a prompt in their order; None where it is refused."""
    controls = set(renderer._pieces.control_ids.values())
    try:
        rendered = renderer.render(prompt, thinking=True)
    except InvalidRequest:
        return None
    return [token_id for token_id in rendered.token_ids if token_id in controls]


def test_no_text_in_any_place_becomes_a_control_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = ALL if NUM_INJECTIONS > 2000 else ALL[:: len(ALL) // NUM_TEMPLATES_AT_A_COMMIT]
    counts: Counter[str] = Counter()
    for index, path in enumerate(paths):
        kind = KINDS[index % len(KINDS)]
        files = files_for(path.read_text("utf-8"), kind)
        files.tokenizer.add_special_tokens(ODD)
        renderer = ChatRenderer(files)
        has_tools = renderer.tool_format is not None
        draw = Random(index)
        controls = sorted(renderer._pieces.control_ids)
        for _ in range(-(-NUM_INJECTIONS // len(paths))):
            places = draw.sample(PLACES, k=draw.choice((1, 1, 1, 2, 4)))
            before, behind = (
                draw.choice(("", "", " ", "\n", "rain ", ".", "<", ">", "|")) for _ in "ab"
            )
            text = f"{before}{payload_of(draw, controls)}{behind}"
            actual, expected = (
                controls_in(renderer, prompt_of(dict.fromkeys(places, phrase), has_tools=has_tools))
                for phrase in (text, "harmless")
            )
            counts["attacks"] += 1
            counts["refused"] += actual is None and expected is not None
            if actual is not None and expected is not None:
                assert actual == expected, (path.stem, places, text)
    with capsys.disabled():
        print(
            f"\n{counts['attacks']} attacks on {len(paths)} templates: "
            f"no control token made, {counts['refused']} refused whose harmless twin is not"
        )
    assert counts["attacks"] >= NUM_INJECTIONS and counts["refused"] < counts["attacks"] / 4
