from typing import Any

import msgspec
import pytest

from engine.protocol import Breakpoint
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.anthropic.request import decode_messages
from gateway.prompt.breakpoints import Slot, find_breakpoints, find_target
from tests.gateway.bodies import LONG, SHORT, body, text, tool

ORDER = (
    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that"
    " blocks are processed in the following order: `tools`, `system`, `messages`."
)
FOUND_5 = "A maximum of 4 blocks with cache_control may be provided. Found 5."


def plan(request: dict[str, Any]) -> list[Breakpoint]:
    return plan_of(decode_messages(msgspec.json.encode(request)), "scope").breakpoints


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def assistant_marked(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [block, text("a")]},
        {"role": "user", "content": "q"},
    ]


THINKING = {"type": "thinking", "thinking": "hm", "signature": "s", "cache_control": SHORT}

BROKEN = [
    pytest.param(body(messages=user(*[text("x", SHORT)] * 5)), FOUND_5, id="V40-five-explicit"),
    pytest.param(
        body(system=[text("x", SHORT)] * 4, cache_control=SHORT), FOUND_5, id="V41-four-and-auto"
    ),
    pytest.param(
        body(messages=user(*[text("x", SHORT)] * 4), cache_control=SHORT),
        FOUND_5,
        id="V42-four-with-coincident-auto",
    ),
    pytest.param(
        body(messages=user(text("x", LONG)), cache_control=SHORT),
        "Top-level cache_control has ttl='5m' but the target block already has cache_control with"
        " ttl='1h'. When both are specified on the same block, they must have matching TTLs.",
        id="V44-auto-mismatch",
    ),
    pytest.param(
        body(system=[text("x", SHORT)], messages=user(text("x", LONG))),
        f"messages.0.content.0.cache_control.ttl: {ORDER}",
        id="V45-message-after-system",
    ),
    pytest.param(
        body(tools=[tool("t", SHORT)], system=[text("x", LONG)]),
        f"system.0.cache_control.ttl: {ORDER}",
        id="V46-system-after-tool",
    ),
    pytest.param(
        body(system=[text("x", SHORT)], cache_control=LONG),
        f"cache_control: {ORDER}",
        id="V47-auto-after-explicit",
    ),
    pytest.param(
        body(messages=user(text("ok"), text("", SHORT))),
        "messages.0.content.1.text: cache_control cannot be set for empty text blocks",
        id="V49-empty-text",
    ),
    pytest.param(
        body(system=[text("", SHORT)]),
        "system.0: cache_control cannot be set for empty text blocks",
        id="V49-empty-system",
    ),
    pytest.param(
        body(messages=assistant_marked(THINKING)),
        "messages.1.content.0.thinking.cache_control: Extra inputs are not permitted",
        id="V50-thinking",
    ),
    *(
        pytest.param(
            body(system=[text("x", {"type": "ephemeral", "ttl": ttl})]),
            "system.0.cache_control.ephemeral.ttl: Input should be '5m' or '1h'",
            id=f"V51-ttl-{ttl!r}",
        )
        for ttl in ("10m", "2h", 300, "", None)
    ),
    pytest.param(
        body(messages=user(text("x", {"type": "ephemeral", "ttl": "2h"}))),
        "messages.0.content.0.text.cache_control.ephemeral.ttl: Input should be '5m' or '1h'",
        id="V51-in-message",
    ),
    pytest.param(
        body(system=[text("x", {"type": "persistent"})]),
        "system.0.cache_control: Input tag 'persistent' found using 'type' does not match any of"
        " the expected tags: 'ephemeral'",
        id="V52-bad-type",
    ),
    pytest.param(
        body(system=[text("x", {"ttl": "5m"})]),
        "system.0.cache_control: Unable to extract tag using discriminator 'type'",
        id="V52-no-type",
    ),
    pytest.param(
        body(system=[text("x"), text("x"), text("x", {**SHORT, "scope": "global"})]),
        "system.2.cache_control.ephemeral.scope: Extra inputs are not permitted",
        id="V53-extra-key",
    ),
    pytest.param(
        body(
            messages=[
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [text("a", SHORT), text("b")],
                        }
                    ],
                },
            ]
        ),
        "messages.2.content.0.tool_result.content.0.cache_control: only the last block of"
        " `content` may carry cache_control",
        id="V54-first-nested",
    ),
    pytest.param(
        body(tools=[{**tool("X", SHORT), "defer_loading": True}]),
        "Tool 'X' cannot have both defer_loading=true and cache_control set. Tools with"
        " defer_loading cannot use prompt caching.",
        id="V55-deferred",
    ),
    pytest.param(
        body(system=[text("x", SHORT)] * 4, messages=user(text("x", LONG))),
        FOUND_5,
        id="V56-count-before-order",
    ),
]


def test_long_before_short_is_fine() -> None:
    marks = [text("x", LONG), text("x", LONG), text("x", SHORT)]
    found = plan(body(system=marks, messages=user(text("x", SHORT))))
    assert [b.ttl for b in found] == ["1h", "1h", "5m", "5m"]


def test_no_eligible_slot_means_no_breakpoint_and_no_error_v58() -> None:
    slots = [Slot(path="messages.0.content.0", can_carry=False)]
    assert find_target(slots) is None
    assert find_breakpoints(slots, "5m") == []


def test_the_automatic_marker_passes_over_what_cannot_carry_one() -> None:
    slots = [Slot(path="a"), Slot(path="b", can_carry=False)]
    assert find_breakpoints(slots, "5m") == [Breakpoint(0, "5m")]
