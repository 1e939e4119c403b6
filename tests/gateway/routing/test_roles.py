"""When a prompt is prefilled by one engine and answered by another."""

import msgspec
import pytest

from engine.protocol.reports import EngineRole
from gateway.prompt.ask import Ask
from gateway.routing.held import Holdings
from gateway.routing.router import MIN_TOKENS, Route, Router, Weights, prefill_elsewhere
from tests.gateway.routing.test_routing import INDEX, NOW, Candidate, ask, candidate

LONG = "word " * 8 * MIN_TOKENS


def engine(number: int, role: EngineRole, *, running: int = 0, model: str = "m") -> Candidate:
    made = candidate(number)
    assert made.description is not None
    made.description = msgspec.structs.replace(made.description, role=role, model=model)
    made.hold()
    for turn in range(running):
        made.load.assign(f"t{turn}", 0, NOW)
        made.load.started(f"t{turn}", 0, NOW)
    return made


def asked(text: str = LONG, *, is_marked: bool = True) -> Ask:
    """With or without a breakpoint at its end."""
    made = ask(text)
    points = made.plan.breakpoints
    assert points, "automatic breakpoints are on"
    plan = made.plan if is_marked else msgspec.structs.replace(made.plan, breakpoints=[])
    return msgspec.structs.replace(made, plan=plan)


def first_leg(one: Ask, engines: list[Candidate]) -> Route[Candidate] | None:
    route = Router().choose(one, engines, NOW)
    return prefill_elsewhere(one, route, engines, Weights(), NOW)


@pytest.mark.parametrize(
    "why",
    [
        *("idle", "nearly idle", "short", "unmarked", "held", "batch"),
        *("no role", "draining", "model", "no events"),
    ],
)
def test_what_one_engine_does_alone(why: str) -> None:
    running = {"idle": 0, "nearly idle": 1}.get(why, 8)
    prefill, decode = engine(0, "prefill"), engine(1, "decode", running=running)
    one = asked("word " * 40 if why == "short" else LONG, is_marked=why != "unmarked")
    if why == "held":
        decode.hold(*(name.digest for name in one.plan.names))
    elif why == "batch":
        one = msgspec.structs.replace(one, is_batch=True)
    elif why == "no role":
        prefill = engine(0, "both", running=8)
    elif why == "draining":
        prefill.is_draining = True
    elif why == "model":
        prefill = engine(0, "prefill", model="other")
    elif why == "no events":
        decode.holdings = Holdings(INDEX)
    assert first_leg(one, [prefill, decode]) is None


def test_an_engine_for_prefill_answers_where_there_is_no_other() -> None:
    assert Router().choose(asked(), [engine(0, "prefill")], NOW).engine.url == "http://engine-0"
