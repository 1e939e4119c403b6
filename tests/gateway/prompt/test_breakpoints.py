"""Which breakpoints a request has, and which automatic caching makes."""

from typing import Any

import pytest

from engine.protocol import (
    Breakpoint,
    Message,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from gateway.base.grants import AutoCache
from gateway.prompt.plan import add_automatic, find_breakpoints, find_target
from gateway.prompt.slots import Slot
from gateway.structs.fleet import AutoCacheMode
from tests.gateway.bodies import LONG, SHORT, body, text, tool

ORDER = (
    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that"
    " blocks are processed in the following order: `tools`, `system`, `messages`."
)
FOUND_5 = "A maximum of 4 blocks with cache_control may be provided. Found 5."


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def marked(**marker: Any) -> list[dict[str, Any]]:
    return [text("x", {"type": "ephemeral", **marker})]


def broken(name: str, message: str, **changes: Any) -> Any:
    return pytest.param(body(**changes), message, id=name)


S = text("x", SHORT)
L = text("x", LONG)
QUESTION = {"role": "user", "content": "q"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "s", "cache_control": SHORT}
THOUGHT = {"role": "assistant", "content": [THINKING, text("a")]}
CALL = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
CALLED = {"role": "assistant", "content": [CALL]}
INNER = [text("a", SHORT), text("b")]
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": INNER}
TTL = "cache_control.ephemeral.ttl: Input should be '5m' or '1h'"
EMPTY = "cache_control cannot be set for empty text blocks"

BROKEN = [
    broken("V40-five-explicit", FOUND_5, messages=user(*[S] * 5)),
    broken("V41-four-and-auto", FOUND_5, system=[S] * 4, cache_control=SHORT),
    broken("V42-four-with-coincident-auto", FOUND_5, messages=user(*[S] * 4), cache_control=SHORT),
    broken(
        "V44-auto-mismatch",
        "Top-level cache_control has ttl='5m' but the target block already has cache_control with"
        " ttl='1h'. When both are specified on the same block, they must have matching TTLs.",
        messages=user(L),
        cache_control=SHORT,
    ),
    broken(
        "V45-message-after-system",
        f"messages.0.content.0.cache_control.ttl: {ORDER}",
        system=[S],
        messages=user(L),
    ),
    broken(
        "V46-system-after-tool",
        f"system.0.cache_control.ttl: {ORDER}",
        tools=[tool("t", SHORT)],
        system=[L],
    ),
    broken("V47-auto-after-explicit", f"cache_control: {ORDER}", system=[S], cache_control=LONG),
    broken(
        "V49-empty-text",
        f"messages.0.content.1.text: {EMPTY}",
        messages=user(text("ok"), text("", SHORT)),
    ),
    broken("V49-empty-system", f"system.0: {EMPTY}", system=[text("", SHORT)]),
    broken(
        "V50-thinking",
        "messages.1.content.0.thinking.cache_control: Extra inputs are not permitted",
        messages=[QUESTION, THOUGHT, QUESTION],
    ),
    *(
        broken(f"V51-ttl-{ttl!r}", f"system.0.{TTL}", system=marked(ttl=ttl))
        for ttl in ("10m", "2h", 300, "", None)
    ),
    broken(
        "V51-in-message",
        f"messages.0.content.0.text.{TTL}",
        messages=user(*marked(ttl="2h")),
    ),
    broken(
        "V52-bad-type",
        "system.0.cache_control: Input tag 'persistent' found using 'type' does not match any of"
        " the expected tags: 'ephemeral'",
        system=marked(type="persistent"),
    ),
    broken(
        "V52-no-type",
        "system.0.cache_control: Unable to extract tag using discriminator 'type'",
        system=[text("x", {"ttl": "5m"})],
    ),
    broken(
        "V53-extra-key",
        "system.2.cache_control.ephemeral.scope: Extra inputs are not permitted",
        system=[text("x"), text("x"), *marked(scope="global")],
    ),
    broken(
        "V54-first-nested",
        "messages.2.content.0.tool_result.content.0.cache_control: only the last block of"
        " `content` may carry cache_control",
        messages=[QUESTION, CALLED, *user(RESULT)],
    ),
    broken(
        "V55-deferred",
        "Tool 'X' cannot have both defer_loading=true and cache_control set. Tools with"
        " defer_loading cannot use prompt caching.",
        tools=[{**tool("X", SHORT), "defer_loading": True}],
    ),
    broken("V56-count-before-order", FOUND_5, system=[S] * 4, messages=user(L)),
]


def test_no_eligible_slot_means_no_breakpoint_and_no_error_v58() -> None:
    slots = [Slot(path="messages.0.content.0", can_carry=False)]
    assert find_target(slots) is None
    assert find_breakpoints(slots, "5m") == []


def test_the_automatic_marker_passes_over_what_cannot_carry_one() -> None:
    slots = [Slot(path="a"), Slot(path="b", can_carry=False)]
    assert find_breakpoints(slots, "5m") == [Breakpoint(0, "5m")]


PROMPT = Prompt(
    [
        Message("user", [TextPart("a"), TextPart("b")]),
        Message("assistant", [ThinkingPart("t"), ToolUsePart("c", "look", {})]),
        Message("user", [ToolResultPart("c", "r"), TextPart("d")]),
    ],
    [Tool("look", {})],
    [TextPart("s")],
)
SLOTS = [Slot(path=str(n), can_carry=n != 4) for n in range(8)]


def placed(
    mode: AutoCacheMode, client_points: list[Breakpoint] | None = None, prompt: Prompt = PROMPT
) -> list[tuple[int, str]]:
    slots = SLOTS[: prompt.num_segments]
    points = add_automatic(prompt, slots, client_points or [], AutoCache(mode))
    return [(point.segment, point.ttl) for point in points]


def test_each_mode_marks_what_it_says() -> None:
    assert placed("off") == []
    assert placed("prefix") == [(1, "5m")]
    # Behind the system prompt, the prompt of the request before, and the last turn.
    assert placed("conversation") == [(1, "5m"), (3, "5m"), (7, "5m")]


def test_only_what_an_operator_set_asks_for_leases() -> None:
    installation = AutoCache()
    owners = installation.but(None, None)
    assert owners == installation
    rules = (installation.but("prefix", None), owners.but(None, "1h"))
    for policy, is_held in ((owners, False), *((rule, True) for rule in rules)):
        points = add_automatic(PROMPT, SLOTS, [], policy)
        assert points and all(point.hold == is_held for point in points)
    # A client's own breakpoint is held beside those that the installation's policy adds.
    marks = add_automatic(PROMPT, SLOTS, [Breakpoint(2, "1h")], installation)
    assert [(point.segment, point.hold) for point in marks] == [(2, True), (7, False)]


def test_places_that_fall_together_are_one() -> None:
    first = Prompt([Message("user", [TextPart("a")])])
    assert placed("conversation", prompt=first) == [(0, "5m")]
    assert placed("prefix", prompt=first) == []
    answered = Prompt([Message("assistant", [TextPart("x")]), Message("user", [TextPart("a")])])
    assert placed("conversation", prompt=answered) == [(1, "5m")]


def test_a_place_that_carries_no_marker_is_passed_over() -> None:
    thought = Prompt([*PROMPT.messages[:1], Message("assistant", [ThinkingPart("t")])], [], [])
    slots = [Slot(path="a"), Slot(path="b"), Slot(path="t", can_carry=False)]
    points = add_automatic(thought, slots, [], AutoCache())
    assert [point.segment for point in points] == [1]


@pytest.mark.parametrize(
    ("client_points", "expected"),
    [
        ([Breakpoint(2, "1h")], [(2, "1h"), (7, "5m")]),
        ([Breakpoint(7, "1h")], [(7, "1h")]),
        ([Breakpoint(n, "1h") for n in (0, 1, 2, 3)], [(n, "1h") for n in (0, 1, 2, 3)]),
    ],
)
def test_beside_the_clients_only_the_last_turn_is_marked(
    client_points: list[Breakpoint], expected: list[tuple[int, str]]
) -> None:
    assert placed("conversation", client_points) == expected


def test_there_are_never_more_than_four_nor_a_longer_ttl_behind_a_shorter() -> None:
    for mask in range(1 << 8):
        client_points = [Breakpoint(n, "1h" if n < 4 else "5m") for n in range(8) if mask >> n & 1][
            :4
        ]
        for ttl in ("5m", "1h"):
            points = add_automatic(PROMPT, SLOTS, client_points, AutoCache("conversation", ttl))
            assert len(points) <= 4
            assert [p.segment for p in points] == sorted({p.segment for p in points})
            ttls = [p.ttl for p in points]
            assert ttls == sorted(ttls), "1h sorts before 5m"
            assert set(client_points) <= set(points)
