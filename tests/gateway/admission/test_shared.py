"""Limits over two gateways that share a PostgreSQL database: real ledgers, two `SharedLimits`."""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from gateway.admission import shared as module
from gateway.admission.accounts import TurnClaim, WorkspaceLimits
from gateway.admission.shared import SharedLimits
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, LedgerUnavailable, RateLimited, SpendLimitReached
from gateway.base.grants import Limits
from gateway.base.settings import DatabaseSettings
from gateway.ledger.access import Exchange, SharedLimitsTable
from gateway.ledger.database import Ledger
from gateway.prompt.ask import Principal
from scripts.stack import ROOT
from tests.gateway.records import turn_record
from tests.migrated import migrate
from tests.postgres import new_database

pytestmark = [pytest.mark.postgres, pytest.mark.anyio]
CLOCK = Clock()


@pytest.fixture
def url(tmp_path: Path, postgres: str) -> str:
    settings = DatabaseSettings(data=tmp_path, database_url=new_database(postgres, uuid4().hex))
    migrate(settings)
    return settings.ledger_url


class Store(SharedLimitsTable):
    """The table, which can be taken away."""

    is_away = is_slow = is_within = False

    @asynccontextmanager
    async def exchange(self, workspaces: Sequence[str]) -> AsyncIterator[Exchange]:
        if self.is_away:
            raise LedgerUnavailable
        async with super().exchange(workspaces) as page:
            self.is_within = bool(workspaces)
            while self.is_slow:
                await asyncio.sleep(0.01)
            yield page
        self.is_within = False


@dataclass
class Gateway:
    limits: WorkspaceLimits
    shared: SharedLimits
    store: Store
    stopping: asyncio.Event
    count: int = 0

    async def take(self, limits: Limits, estimate: int = 1, most_cost: int = 0) -> str:
        self.count += 1
        turn_id = f"{id(self)}-{self.count}"
        principal = Principal("w", "k", "s", limits=limits)
        await self.shared.take(TurnClaim(turn_id, principal, estimate, 0, most_cost))
        return turn_id

    def leave(self, turn_id: str, *, is_open: bool = False) -> None:
        self.limits.leave(turn_id, "w", is_open=is_open)

    def close(self, turn_id: str, **counts: int) -> None:
        self.leave(turn_id, is_open=True)
        self.limits.count_used(turn_record(turn_id, opened_at=CLOCK.wall(), **counts))


@asynccontextmanager
async def gateways(url: str, number: int = 2) -> AsyncIterator[list[Gateway]]:
    stopping = asyncio.Event()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as running:
        members = []
        for index in range(number):
            ledger = Ledger(url, 60.0)
            stack.push_async_callback(ledger.close)
            store = Store(ledger)
            limits = WorkspaceLimits(CLOCK.monotonic, CLOCK.wall)
            shared = SharedLimits(limits, store, f"gateway-{index}", CLOCK)
            running.create_task(shared.run(stopping))
            members.append(Gateway(limits, shared, store, stopping))
        for member in members:
            await until(lambda member=member: member.shared.is_shared)  # type: ignore[misc]
        yield members
        stopping.set()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def eventually_takes(gateway: Gateway, limits: Limits, **wanted: int) -> str:
    async with asyncio.timeout(60):
        while True:
            try:
                return await gateway.take(limits, **wanted)
            except GatewayError:
                await asyncio.sleep(0.02)


async def test_turns_at_one_time_are_counted_over_both(url: str) -> None:
    async with gateways(url) as (a, b):
        limits = Limits(max_concurrency=3)
        first, *_ = [await gateway.take(limits) for gateway in (a, b, a)]
        for gateway in (a, b):
            with pytest.raises(RateLimited, match="3 concurrent requests"):
                await gateway.take(limits)
        a.leave(first)
        await b.take(limits)
        with pytest.raises(RateLimited):
            await a.take(limits)


async def test_a_client_that_goes_from_one_to_the_other_is_never_refused(url: str) -> None:
    """Its turn has ended and its money is back, whether or not the other was told of it yet."""
    async with gateways(url) as (a, b):
        for limits, most_cost in ((Limits(max_concurrency=1), 0), (Limits(monthly_spend=999), 900)):
            for gateway in [a, b] * 20:
                gateway.close(await gateway.take(limits, most_cost=most_cost), cost=most_cost and 1)
                await gateway.shared.told("w")


async def test_requests_and_tokens_a_minute_are_of_both(url: str) -> None:
    async with gateways(url) as (a, b):
        limits = Limits(requests_per_minute=6, tokens_per_minute=10_000)
        turns = [(gateway, await gateway.take(limits, 1000)) for gateway in (a, b, a, b, a)]
        for gateway, turn_id in turns:
            gateway.close(turn_id, input_tokens=900)
        with pytest.raises(RateLimited, match="10000 tokens per minute"):
            await b.take(limits, 100_000)
        await b.take(limits, 100)
        for gateway in (a, b):
            with pytest.raises(RateLimited, match="6 requests per minute"):
                await gateway.take(limits, 1)
        rate = a.limits.rates(Principal("w", "k", "s", limits=limits)).tokens
        assert rate is not None and rate.remaining <= 5500 + 60 * 170


async def test_money_is_reserved_over_both(url: str) -> None:
    async with gateways(url) as (a, b):
        limits = Limits(monthly_spend=100)
        turns = [await a.take(limits, most_cost=40) for _ in range(2)]
        with pytest.raises(SpendLimitReached):
            await b.take(limits, most_cost=40)
        b.leave(await b.take(limits, most_cost=20))
        a.close(turns[0], cost=10)
        await eventually_takes(b, limits, most_cost=40)
        with pytest.raises(SpendLimitReached):
            await a.take(limits, most_cost=20)
        a.close(turns[1], cost=40)
        with pytest.raises(SpendLimitReached):
            await eventually_takes(b, limits, most_cost=10)
            await b.take(limits, most_cost=1)


async def test_while_the_database_is_away_each_counts_for_itself_and_tells_later(url: str) -> None:
    async with gateways(url) as (a, b):
        limits = Limits(requests_per_minute=4)
        await a.take(limits)
        a.store.is_away = b.store.is_away = True
        await asyncio.gather(*(gateway.take(limits) for gateway in (a, b)))
        assert not a.shared.is_shared and not b.shared.is_shared
        await b.take(limits)
        a.store.is_away = b.store.is_away = False
        await until(lambda: a.shared.is_shared and b.shared.is_shared)
        with pytest.raises(RateLimited):
            await a.take(limits)
            await a.take(limits)


async def test_a_killed_gateway_gives_its_places_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_concurrency=1)
    async with gateways(url, 1) as (a,):
        await a.take(limits)
    async with gateways(url, 2) as (_, b):
        with pytest.raises(RateLimited):
            await b.take(limits)
        monkeypatch.setattr(module, "_STALE_SECONDS", 0.0)
        await b.take(limits)


async def test_a_killed_gateways_money_counts_until_it_tells_what_its_turns_cost(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(monthly_spend=100)
    async with gateways(url, 1) as (a,):
        turn_id = await a.take(limits, most_cost=60)
    monkeypatch.setattr(module, "_STALE_SECONDS", 0.0)
    async with gateways(url, 2) as (again, b):
        with pytest.raises(SpendLimitReached):
            await b.take(limits, most_cost=60)
        again.limits.count_used(turn_record(turn_id, opened_at=CLOCK.wall(), cost=5))
        await eventually_takes(b, limits, most_cost=60)


async def test_a_gateway_that_stops_tells_what_its_last_turns_gave_back(url: str) -> None:
    limits = Limits(monthly_spend=100)
    async with gateways(url, 1) as (a,):
        a.close(await a.take(limits, most_cost=60), cost=5)
    async with gateways(url, 2) as (_, b):
        await b.take(limits, most_cost=60)


async def test_turns_that_go_while_they_wait_give_back_what_they_took(url: str) -> None:
    async with gateways(url) as (a, b):
        limits = Limits(max_concurrency=50)
        chance = random.Random(1)
        for _ in range(20):
            tasks = [
                asyncio.create_task(gateway.take(limits)) for gateway in (a, b) for _ in range(5)
            ]
            await asyncio.sleep(chance.random() * 0.01)
            for task in tasks:
                task.cancel()
            for gateway, turn in zip([a] * 5 + [b] * 5, tasks, strict=True):
                try:
                    gateway.leave(await turn)
                except asyncio.CancelledError:
                    pass
        # A turn that goes while an exchange is written gives its place back at the exchange's end.
        await until(lambda: a.limits.in_flight == b.limits.in_flight == 0)
        await asyncio.gather(*(gateway.take(limits) for gateway in (a, b) for _ in range(25)))


async def test_no_interleaving_lets_more_turns_run_than_the_limit(url: str) -> None:
    async with gateways(url) as pair:
        limits = Limits(max_concurrency=4)
        running = [0]
        most = [0]
        chance = random.Random(2)

        async def client(gateway: Gateway) -> int:
            num_served = 0
            for _ in range(15):
                try:
                    turn_id = await gateway.take(limits)
                except RateLimited:
                    await asyncio.sleep(0.02)
                    continue
                running[0] += 1
                most[0] = max(most[0], running[0])
                await asyncio.sleep(chance.random() * 0.02)
                running[0] -= 1
                gateway.close(turn_id)
                num_served += 1
            return num_served

        served = await asyncio.gather(*(client(gateway) for gateway in pair for _ in range(6)))
        assert most[0] == 4 and sum(served) > 20


async def test_a_turn_that_comes_while_its_workspace_is_told_idle_is_known_to_others(
    url: str,
) -> None:
    """It was forgotten, so its end was not told: the others refused until it was stale."""
    async with gateways(url) as (a, b):
        limits = Limits(max_concurrency=1)
        turn_id = await a.take(limits)
        a.store.is_slow = True
        a.leave(turn_id)
        await until(lambda: a.store.is_within)
        turn = asyncio.create_task(a.take(limits))
        await asyncio.sleep(0)
        a.store.is_slow = False
        turn_id = await turn
        with pytest.raises(RateLimited):
            await b.take(limits)
        a.leave(turn_id)
        async with asyncio.timeout(module._STALE_SECONDS / 2):
            await eventually_takes(b, limits)


FROZEN = """
import asyncio, os, signal, sys
from gateway.ledger.database import Ledger
from gateway.ledger.access import SharedLimitsTable

async def freeze():
    async with SharedLimitsTable(Ledger(sys.argv[1], 60.0)).exchange(["w"]):
        os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(freeze())
"""


async def test_a_gateway_that_is_frozen_in_an_exchange_holds_up_the_others_for_seconds(
    url: str,
) -> None:
    with subprocess.Popen([sys.executable, "-c", FROZEN, url], cwd=ROOT) as frozen:
        try:
            async with gateways(url, 1) as (a,):
                os.waitpid(frozen.pid, os.WUNTRACED)
                await a.take(Limits(requests_per_minute=100))
                assert not a.shared.is_shared
                await until(lambda: a.shared.is_shared)
        finally:
            frozen.kill()
