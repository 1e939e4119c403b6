"""The reason of each marker: the engine's, or what the gateway knows beyond it."""

from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from engine.protocol import (
    BreakpointReport,
    InputUsage,
    Message,
    MissReason,
    Name,
    Prompt,
    Receipt,
    Started,
    TextPart,
    Tool,
)
from gateway.prompt.fingerprint import Divergence
from gateway.prompt.plan import Plan, make_plan
from gateway.prompt.slots import Slot
from gateway.structs.misses import DivergenceKind
from gateway.turn.diagnostics import LastHolders
from gateway.turn.misses import Missed, Misses

# A tool, a system block and two messages; each segment is 100 tokens.
PROMPT = Prompt(
    tools=[Tool("look", {"type": "object"})],
    system=[TextPart("rules")],
    messages=[Message("user", [TextPart("one"), TextPart("two")])],
)
MARKS = (1, 2, 3)
Told = MissReason | UnsetType | None


def planned() -> Plan:
    slots = [
        Slot(path=f"{segment}", marker="5m" if segment in MARKS else None, num_markers=1)
        for segment in range(4)
    ]
    slots[0] = msgspec.structs.replace(slots[0], num_markers=0)
    return make_plan(PROMPT, slots, None, "scope")


PLAN = planned()


def answer(
    *missed: Told, read: int = 0, reason: MissReason | None = None, epoch: str = "e1"
) -> Any:
    reports = [
        BreakpointReport(segment=segment, state="leased", ttl="5m", missed=reason)
        for segment, reason in zip(MARKS, missed, strict=True)
    ]
    ends = [0 if name.characters else 100 * (name.segment + 1) for name in PLAN.names]
    return Started(
        request_id="r",
        epoch=epoch,
        usage=InputUsage(input_tokens=400 - read, cache_read_tokens=read),
        breakpoints=reports,
        receipt=Receipt(name_tokens=ends, num_held=len(ends)),
        miss_reason=reason,
    )


def known(*holdings: tuple[int, str, str]) -> LastHolders:
    """Segments whose prefixes stood on an engine of epoch `e1`, for a model."""
    holders = LastHolders({"one": "e1", "two": "e1"}.get)
    for segment, engine, model in holdings:
        name = next(n for n in PLAN.names if n.segment == segment and n.characters is None)
        report = BreakpointReport(segment=segment, state="leased", expires_in_seconds=300.0)
        started = msgspec.structs.replace(answer(None, None, None), breakpoints=[report])
        holders.learn(engine, model, started, [Name(name.digest, segment)], 0.0)
    return holders


def explained(
    started: Started, holders: LastHolders, change: Divergence | None = None, engine: str = "one"
) -> Missed:
    misses = Misses(
        holders=holders,
        engine=engine,
        model="m",
        epoch=started.epoch,
        arrived=1.0,
        plan=PLAN,
        started=started,
    )
    return misses.explain(change)


def test_the_engines_own_word_stands_where_it_knows_more_than_cold() -> None:
    started = answer(None, "ttl_expired", "in_progress_race", read=200, reason="ttl_expired")
    explanation = explained(started, known((3, "two", "m")))
    assert explanation == ("ttl_expired", {1: None, 2: "ttl_expired", 3: "in_progress_race"})


def test_a_prompt_that_nobody_knows_is_cold_and_one_that_went_on_grew() -> None:
    assert explained(answer("cold", "cold", "cold", reason="cold"), known()) == (
        "cold",
        {1: "cold", 2: "cold", 3: "cold"},
    )
    assert explained(answer(None, "grew", "grew", read=200), known()) == (
        None,
        {1: None, 2: "grew", 3: "grew"},
    )


def test_a_later_mark_that_stands_on_another_engine_is_told_beside_a_read() -> None:
    explanation = explained(answer(None, "grew", "grew", read=200), known((2, "two", "m")))
    assert explanation.marks == {1: None, 2: "routed_elsewhere", 3: "routed_elsewhere"}
    assert explanation.request == "routed_elsewhere"
    explanation = explained(answer(None, "grew", "grew", read=200), known((1, "two", "m")))
    assert explanation == (None, {1: None, 2: "grew", 3: "grew"}), (
        "who held what was read is no reason"
    )


def test_each_mark_has_the_reason_of_what_stands_up_to_it() -> None:
    holders = known((1, "two", "m"), (2, "one", "m"))
    explanation = explained(answer("cold", "cold", "cold", reason="cold", epoch="e2"), holders)
    assert explanation.marks == {1: "routed_elsewhere", 2: "engine_restart", 3: "engine_restart"}
    assert explanation.request == "engine_restart"


def test_a_changed_model_wins_over_a_shared_head_that_another_engine_has() -> None:
    """The conversation was with another model; its head is known of this one, elsewhere."""
    holders = known((3, "two", "other"), (1, "two", "m"))
    explanation = explained(answer("cold", "cold", "cold", reason="cold"), holders)
    assert explanation.marks == {1: "routed_elsewhere", 2: "routed_elsewhere", 3: "model_changed"}
    assert explanation.request == "model_changed"


def test_a_changed_model_that_the_client_named_is_the_reason_of_every_mark() -> None:
    change = Divergence("model_changed", 0, 400, 0)
    explanation = explained(
        answer("cold", "cold", "cold", reason="cold"), known((3, "two", "m")), change
    )
    assert explanation == ("model_changed", dict.fromkeys(MARKS, "model_changed"))


@pytest.mark.parametrize(
    ("kind", "segment", "reasons"),
    [
        ("tools_changed", 0, ["tools_changed"] * 3),
        ("system_changed", 1, ["system_changed"] * 3),
        ("messages_changed", 2, ["cold", "messages_changed", "messages_changed"]),
        ("messages_changed", 3, ["cold", "cold", "messages_changed"]),
    ],
)
def test_a_difference_is_the_reason_of_the_marks_behind_it(
    kind: DivergenceKind, segment: int, reasons: list[str]
) -> None:
    change = Divergence(kind, segment, 100, 0)
    explanation = explained(answer("cold", "cold", "cold", reason="cold"), known(), change)
    assert list(explanation.marks.values()) == reasons
    assert explanation.request == reasons[-1]


def test_a_difference_within_what_was_read_is_no_reason() -> None:
    change = Divergence("system_changed", 1, 300, 0)
    explanation = explained(answer(None, "grew", "grew", read=200), known(), change)
    assert explanation == (None, {1: None, 2: "grew", 3: "grew"})
    behind = Divergence("messages_changed", 2, 300, 0)
    explanation = explained(answer(None, "grew", "grew", read=200), known(), behind)
    assert explanation.marks == {1: None, 2: "messages_changed", 3: "messages_changed"}
    assert explanation.request == "messages_changed"


def test_of_an_engine_that_tells_of_no_mark_the_request_has_a_reason_alone() -> None:
    change = Divergence("tools_changed", 0, 400, 0)
    explanation = explained(answer(UNSET, UNSET, UNSET, reason="cold"), known(), change)
    assert explanation == ("tools_changed", {})
    assert explained(answer(UNSET, UNSET, UNSET, read=400), known()) == (None, {})


def test_marks_that_take_no_part_keep_their_reason_and_are_not_the_requests() -> None:
    explanation = explained(
        answer("cold", "cold", "no_boundary", reason="cold"), known((2, "two", "m"))
    )
    assert explanation.marks == {1: "cold", 2: "routed_elsewhere", 3: "no_boundary"}
    assert explanation.request == "routed_elsewhere"
