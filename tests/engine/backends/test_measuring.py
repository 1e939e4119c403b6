"""Exact turns are answered while approximations are measured; approximate ones are told so."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from engine.approximate.asking import Approximations
from engine.backends.measuring import PAUSES, SLICE_SECONDS, measure_behind
from engine.errors import FieldRefused, Overloaded
from engine.protocol import Breakpoint, GenerateRequest
from engine.protocol.reports import Technique
from tests.engine.backends.local import finish, request, serving

pytestmark = pytest.mark.anyio

TOO_FAR = Technique(
    method="kvzip", parameter=0.1, kl=3.0, agreement=0.1, tokens=9, is_allowed=False
)
NUM_PARTS = 20
DEADLINE_SECONDS = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def approximate() -> GenerateRequest:
    return request("a word " * 200, breakpoints=[Breakpoint(0, keep=0.5)])


def waiting_gate(release: threading.Event, parts: list[int]) -> Iterator[Technique | None]:
    """Its parts do nothing until they are released."""
    while not release.is_set() or len(parts) < NUM_PARTS:
        parts.append(1)
        yield None
    yield TOO_FAR


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_exact_turns_are_answered_and_approximate_ones_told_to_come_again() -> None:
    release = threading.Event()
    parts: list[int] = []
    able = Approximations(gate=waiting_gate(release, parts))
    async with serving(approximate=able) as engine:
        assert engine.describe().is_measuring and engine.describe().techniques == []
        await until(lambda: bool(parts))
        await finish(engine, request())
        with pytest.raises(Overloaded, match="still measures how far approximate answers are"):
            await engine.open(approximate())
        assert engine.describe().is_measuring
        release.set()
        await until(lambda: not engine.describe().is_measuring)
        assert engine.describe().techniques == [TOO_FAR]
        with pytest.raises(FieldRefused, match=r"kvzip at 0\.1 is too far from exact"):
            await engine.open(approximate())
        await finish(engine, request())


async def test_an_engine_stops_while_it_measures() -> None:
    release = threading.Event()
    async with serving(approximate=Approximations(gate=waiting_gate(release, []))) as engine:
        assert engine.describe().is_measuring


async def test_an_error_of_the_measuring_ends_the_engine() -> None:
    def failing() -> Iterator[Technique | None]:
        yield None
        raise ZeroDivisionError

    crashes: list[BaseException] = []
    async with serving(approximate=Approximations(gate=failing()), crashes=crashes):
        await until(lambda: bool(crashes))
    assert isinstance(crashes[0], ZeroDivisionError)


async def test_who_asks_for_answers_has_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    plain = asyncio.sleep

    measuring = asyncio.current_task()

    async def sleep(seconds: float) -> None:
        # Servers of other tests may sleep too.
        if asyncio.current_task() is not measuring:
            await plain(seconds)
            return
        pauses.append(seconds)
        await plain(0)

    def working(num_parts: int, pause: threading.Event) -> Iterator[Technique | None]:
        for _ in range(num_parts):
            pause.wait(SLICE_SECONDS)
            yield None

    monkeypatch.setattr("engine.backends.measuring.asyncio.sleep", sleep)
    for is_busy in (True, False):
        pauses.clear()
        able = Approximations(gate=working(3, threading.Event()))

        async def call(function: Callable[[], float | None]) -> float | None:
            return function()

        await measure_behind(able, call, lambda is_busy=is_busy: is_busy)  # type: ignore[misc]
        least = PAUSES * SLICE_SECONDS * is_busy
        assert len(pauses) == 3 and all(pause >= least for pause in pauses)
        assert is_busy or pauses == [0, 0, 0]
