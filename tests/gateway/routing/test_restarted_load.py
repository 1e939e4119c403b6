"""An engine that comes, or comes back, is told of no load. It does not get every turn for that."""

import time
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime

import pytest

from engine.supervisor import Supervisor
from gateway.routing.client import EngineHttp
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.held import Ends
from gateway.routing.model_ids import ModelIds
from gateway.routing.router import PromptSizes, Weights, place
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import serve

pytestmark = pytest.mark.anyio

NUM_ENGINES = 3
RECENT_TOKENS = 1_000_000
"""Of each engine: it computed 1,700 a second for a long time."""
NUM_TURNS = 60
TURN_TOKENS = 2_000


async def start_fleet(stack: AsyncExitStack) -> tuple[Fleet, list[ScriptedEngine]]:
    """Engines that answer, with a recent load each."""
    http = await stack.enter_async_context(aclosing(EngineHttp()))
    engines = [ScriptedEngine(epoch=f"epoch-{number}") for number in range(NUM_ENGINES)]
    urls = [stack.enter_context(serve(engine)) for engine in engines]

    def make(name: str, url: str) -> Engine:
        return Engine(name, url, engines[0].secret, http)

    ids = ModelIds(None, lambda: datetime.now(UTC))
    fleet = Fleet(urls, make, Supervisor(), ids)
    for engine in fleet.engines:
        await engine.poll()
        assert engine.is_ready
    now = time.monotonic()
    for engine in fleet.engines:
        engine.load.assign("earlier", RECENT_TOKENS, now)
        engine.load.ended("earlier")
    return fleet, engines


def place_turns(fleet: Fleet) -> Counter[str]:
    """Where turns go that all come at once, by new prompts that nobody holds."""
    now = time.monotonic()
    turns: Counter[str] = Counter()
    for number in range(NUM_TURNS):
        prompt = PromptSizes(Ends([f"{number}"], [TURN_TOKENS]), TURN_TOKENS)
        chosen = place(prompt, fleet.engines, Weights(), now).engine
        chosen.load.assign(f"turn {number}", TURN_TOKENS, now)
        turns[chosen.name] += 1
    return turns


async def test_a_restarted_engine_gets_its_part_of_the_turns() -> None:
    """It got all 60, though each that it was given waited for those before."""
    async with AsyncExitStack() as stack:
        fleet, engines = await start_fleet(stack)
        engines[0].restart()
        await fleet.engines[0].poll()
        turns = place_turns(fleet)
        assert all(turns[engine.name] < NUM_TURNS / 2 for engine in fleet.engines), turns
        assert turns[fleet.engines[0].name] > 0, turns


async def test_an_engine_that_is_added_gets_its_part_of_the_turns() -> None:
    async with AsyncExitStack() as stack:
        fleet, _ = await start_fleet(stack)
        url = stack.enter_context(serve(ScriptedEngine(epoch="new")))
        engine = await fleet.add(url)
        stack.push_async_callback(fleet.stop)
        turns = place_turns(fleet)
        assert 0 < turns[engine.name] < NUM_TURNS / 2, turns
