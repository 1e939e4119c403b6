"""What changed since an earlier prompt of the same key, for clients that ask for no comparison."""

from typing import Any
from uuid import UUID

import msgspec
import pytest

from gateway.base.background import Background
from gateway.base.catalogue import CatalogueModel
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import ask_of
from gateway.dialects.lowering import RequestContext
from gateway.prompt.ask import Principal
from gateway.prompt.fingerprint import Fingerprint
from gateway.turn.diagnostics import PromptComparer
from tests.gateway.bodies import body, text, tool

RULES = "\n".join(f"Rule {n}: form {n * 7} goes to desk {n % 5}." for n in range(8))
OTHERS = "\n".join(f"Step {n}: mix {n * 3} parts of flour with milk." for n in range(8))
PAPER = "The committee met and found that nothing was to be done about it. " * 8


def printed(system: Any, question: str = "Why?", model: str = "m", **more: Any) -> Fingerprint:
    request = body(system=system, messages=[{"role": "user", "content": question}], **more)
    decoded = decode_messages(msgspec.json.encode(request))
    who = Principal("w", "k", "w")
    context = RequestContext(who, CatalogueModel(id=model, display_name=model), 0.0)
    return ask_of(decoded, context, "2023-06-01").fingerprint(400, ())


def changed(earlier: Fingerprint, later: Fingerprint) -> str | None:
    async def none(turn_id: str, workspace: str) -> bytes | None:
        return None

    comparer = PromptComparer(none, Background())
    comparer.remember("w", "msg_" + "0" * 28, earlier, "k")
    assert comparer.changed_since("another key", later) is None
    divergence = comparer.changed_since("k", later)
    return None if divergence is None else divergence.kind


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{UUID(int=1)}\n{RULES}", f"{UUID(int=2)}\n{RULES}"),
        (f"2026-11-28\n{RULES}", f"2026-11-29\n{RULES}"),
        (f"At 10:31 in Paris: {RULES}", f"At 10:32 in Paris: {RULES}"),
        (f"{RULES}\nToday is Sunday.", f"{RULES}\nToday is Monday."),
        ([text("Run 1."), text(RULES)], [text("Run 2."), text(RULES)]),
        ([text(RULES)], [text("A new first block."), text(RULES)]),
    ],
)
def test_a_short_system_prompt_that_changed_is_known_again(before: Any, after: Any) -> None:
    assert changed(printed(before), printed(after)) == "system_changed"


def test_a_line_in_front_of_the_same_paper_is_a_changed_system_prompt() -> None:
    assert changed(printed("Be brief.", PAPER), printed("Be polite.", PAPER)) == "system_changed"
    assert changed(printed("Be brief.", "Why?"), printed("Be polite.", "Why?")) is None


def test_a_tool_that_changed_in_front_of_the_same_system_prompt_is_named() -> None:
    before = printed(RULES, tools=[tool("look")])
    assert changed(before, printed(RULES, tools=[tool("listen")])) == "tools_changed"


@pytest.mark.parametrize("size", [0, 4096])
def test_behind_many_tools_a_system_prompt_is_still_known_again(size: int) -> None:
    """Neither 120 tools nor 480 KiB of them leave the system prompt out."""
    tools = [{**tool(f"tool_{n}"), "description": "d" * size} for n in range(120)]
    others = [tool("another"), *tools[1:]]
    before = printed(f"{UUID(int=1)}\n{RULES}", tools=tools)
    assert changed(before, printed(f"{UUID(int=2)}\n{RULES}", tools=tools)) == "system_changed"
    assert changed(before, printed(f"{UUID(int=2)}\n{RULES}", tools=others)) == "tools_changed"
    assert changed(before, printed(OTHERS, tools=others)) is None


def test_another_prompt_and_another_message_are_no_change() -> None:
    assert changed(printed(RULES), printed(OTHERS)) is None
    assert changed(printed(RULES, "One."), printed(RULES, "Two.")) is None
    assert changed(printed(RULES), printed(f"New. {RULES}", model="n")) is None
