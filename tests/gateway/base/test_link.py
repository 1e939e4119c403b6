"""Messages between two processes, over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from gateway.base.errors import LedgerRefused, Overloaded
from gateway.base.link import Failed, Handler, Link


@asynccontextmanager
async def linked(handlers: Mapping[str, Handler]) -> AsyncIterator[tuple[Link, Link]]:
    """The asking end, and the one that has the handlers."""
    left, right = socket.socketpair()
    asking, answering = await Link.over(left, {}), await Link.over(right, handlers)
    try:
        yield asking, answering
    finally:
        asking.close()
        answering.close()
        await asyncio.sleep(0.01)


def test_messages_of_any_length_arrive_whole_and_in_order() -> None:
    async def run() -> None:
        heard: list[bytes] = []
        async with linked({"say": heard.append, "length": lambda body: len(body)}) as (asking, _):
            asking.tell("say", b"a")
            asking.tell("say", "é" * 3)
            assert await asking.ask("length", bytes(3 << 20), int, 30) > 3 << 20
            assert len(heard) == 2  # what was told before has been heard

    asyncio.run(run())


def test_answers_come_in_any_order_to_those_who_asked() -> None:
    async def run() -> None:
        first = asyncio.Event()

        async def slow(_: bytes) -> str:
            await first.wait()
            return "slow"

        def fast(_: bytes) -> str:
            first.set()
            return "fast"

        async with linked({"slow": slow, "fast": fast}) as (asking, _):
            waiting = asyncio.create_task(asking.ask("slow", None, str, 30))
            await asyncio.sleep(0)
            assert await asking.ask("fast", None, str, 30) == "fast"
            assert await waiting == "slow"

    asyncio.run(run())


def test_a_failure_is_told_by_its_kind_and_one_that_nobody_foresaw_is_one_too() -> None:
    async def run() -> None:
        async def refuse(_: bytes) -> None:
            raise LedgerRefused("too long") from ValueError("the value")

        async def breaks(_: bytes) -> None:
            raise KeyError("no such row")

        async with linked({"refuse": refuse, "breaks": breaks}) as (asking, _):
            with pytest.raises(Failed, match=r"too long \(ValueError") as failed:
                await asking.ask("refuse", None, str, 30)
            assert failed.value.kind == "LedgerRefused"
            with pytest.raises(Failed) as failed:
                await asking.ask("breaks", None, str, 30)
            assert failed.value.kind == "KeyError"
            with pytest.raises(Failed) as failed:
                await asking.ask("unknown", None, str, 30)
            assert failed.value.kind == "NotFound"

    asyncio.run(run())


def test_nobody_waits_for_a_process_that_is_silent_or_gone() -> None:
    async def run() -> None:
        async def silent(_: bytes) -> None:
            await asyncio.sleep(3600)

        async with linked({"silent": silent}) as (asking, answering):
            with pytest.raises(Overloaded):
                await asking.ask("silent", None, str, 0.01)
            waiting = asyncio.create_task(asking.ask("silent", None, str, 3600))
            await asyncio.sleep(0)
            answering.close()
            with pytest.raises(Overloaded):
                await waiting
            with pytest.raises(Overloaded):
                await asking.ask("silent", None, str, 3600)

    asyncio.run(run())
