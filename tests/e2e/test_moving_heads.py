"""What moves at the head of a prompt (a run id, a date, a time) is named, wherever a person looks.

The wire, the ledger, the verdict of Why and Advice say the same, and nobody is told to mark what
would be written again each time. No client here asked to compare.
"""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import msgspec
import pytest

from dashboard.views.why import Verdict, verdict
from gateway.structs.usage import Turn, TurnDivergence
from tests.e2e.fleet import Gateway, running_fleet
from tests.e2e.prompts import handbook

SETTINGS = {"ENGINE_MIN_CACHE_TOKENS": "32", "ENGINE_SYNTHETIC_PREFILL_US": "0"}
Head = Callable[[int, str], str]


def rules(number: int) -> str:
    """What stays the same: a few lines, shorter than a named prefix, or a long text in one line."""
    return handbook(30 if number % 2 else 12).replace(". ", ".\n")


HEADS: dict[str, Head] = {
    "a UUID first": lambda n, text: f"{UUID(int=n * 7919)}\n{text}",
    "an ISO date first": lambda n, text: f"2026-11-{n:02}\n{text}",
    "a date and a time in one line with the text": lambda n, text: (
        f"2026-11-29T10:{n:02}:00Z {text}"
    ),
    "a time in the middle of line one": lambda n, text: (
        f"You help the staff of ACME (it is 10:31:{n:02} in Paris) and keep to these:\n{text}"
    ),
    "a short block in front of a long one": lambda n, text: f"Run {n}.\0{text}",
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_fleet(tmp_path_factory.mktemp("heads"), 1, 1, SETTINGS) as fleet:
        yield fleet.gateway


def blocks(system: str, *, is_marked: bool) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in system.split("\0")]
    if is_marked:
        parts[-1]["cache_control"] = {"type": "ephemeral"}
    return parts


def judged(gateway: Gateway, turn_id: str) -> tuple[Turn, TurnDivergence, Verdict]:
    """A turn as the ledger has it, where it differs from an earlier one, and what Why says."""
    turn = msgspec.convert(gateway.get(f"turns/{turn_id}"), Turn)
    divergence = msgspec.convert(gateway.get(f"turns/{turn_id}/divergence"), TurnDivergence)
    return turn, divergence, verdict(turn, divergence)


def of_workspace(gateway: Gateway, name: str) -> Gateway:
    gateway.workspace(name)
    return Gateway(gateway.url, workspace_key=gateway.make_key(name)[1], data=gateway.data)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("is_marked", [True, False])
def test_what_moves_in_front_is_named_everywhere(
    gateway: Gateway, name: str, is_marked: bool
) -> None:
    number = [*HEADS].index(name)
    workspace = f"heads-{number}-{int(is_marked)}"
    asking = of_workspace(gateway, workspace)
    text = rules(number)
    answers = [
        asking.answer(blocks(HEADS[name](n, text), is_marked=is_marked)) for n in (3, 4, 5, 6)
    ]
    for answer in answers:
        gateway.recorded(answer["id"])
    holdfast = answers[-1]["holdfast"]
    reason = "system_changed" if is_marked else "no_breakpoint"
    assert holdfast["miss_reason"] == reason
    assert [point["missed"] for point in holdfast["breakpoints"]] == [reason] * is_marked
    turn, divergence, judgement = judged(gateway, answers[-1]["id"])
    assert turn.miss_reason == reason
    assert [mark.missed for mark in turn.marks or ()] == [reason] * is_marked
    assert (divergence.kind, divergence.section) == ("system_changed", "system")
    assert judgement.advice.change.startswith("Move what varies behind the")
    (stream,) = gateway.post("advise", {"workspace": workspace})["streams"]
    assert stream["verdict"] == "fix"
    assert [finding["path"] for finding in stream["findings"]] == ["system.0"]


def test_another_prompt_altogether_is_no_changed_one(gateway: Gateway) -> None:
    asking = of_workspace(gateway, "others")
    reasons = [asking.answer(rules(n))["holdfast"]["miss_reason"] for n in range(3)]
    assert reasons == ["cold"] * 3
