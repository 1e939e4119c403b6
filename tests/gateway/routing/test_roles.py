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
    member = candidate(number)
    assert member.description is not None
    member.description = msgspec.structs.replace(member.description, role=role, model=model)
    member.hold()
    for turn in range(running):
        member.load.assign(f"t{turn}", 0, NOW)
        member.load.started(f"t{turn}", 0, NOW)
    return member


def ask_of(text: str = LONG, *, is_marked: bool = True) -> Ask:
    """With or without a breakpoint at its end."""
    question = ask(text)
    points = question.plan.breakpoints
    assert points, "automatic breakpoints are on"
    plan = question.plan if is_marked else msgspec.structs.replace(question.plan, breakpoints=[])
    return msgspec.structs.replace(question, plan=plan)


def first_leg(question: Ask, engines: list[Candidate]) -> Route[Candidate] | None:
    route = Router().choose(question, engines, NOW)
    return prefill_elsewhere(question, route, engines, Weights(), NOW)


@pytest.mark.parametrize(
    "why",
    [
        *("idle", "nearly idle", "short", "unmarked", "held", "batch"),
        *("no role", "draining", "model", "no events"),
    ],
)
def test_what_one_engine_does_alone(why: str) -> None:
    running = {"idle": 0, "nearly idle": 1}.get(why, 8)
    prefill = engine(0, "prefill")
    decode = engine(1, "decode", running=running)
    question = ask_of("word " * 40 if why == "short" else LONG, is_marked=why != "unmarked")
    if why == "held":
        decode.hold(*(name.digest for name in question.plan.names))
    elif why == "batch":
        question = msgspec.structs.replace(question, is_batch=True)
    elif why == "no role":
        prefill = engine(0, "both", running=8)
    elif why == "draining":
        prefill.is_draining = True
    elif why == "model":
        prefill = engine(0, "prefill", model="other")
    elif why == "no events":
        decode.holdings = Holdings(INDEX)
    assert first_leg(question, [prefill, decode]) is None


def test_an_engine_for_prefill_answers_where_there_is_no_other() -> None:
    assert Router().choose(ask_of(), [engine(0, "prefill")], NOW).engine.url == "http://engine-0"
