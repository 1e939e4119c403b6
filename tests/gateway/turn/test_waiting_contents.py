"""What waits for the database is counted right while it is moved there."""

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import Prompt, TextDelta
from gateway.base.background import Background
from gateway.base.clock import Clock
from gateway.journal.contents import Content
from gateway.turn.contents import ContentWriter

pytestmark = pytest.mark.anyio


class SlowJournal:
    """Has contents, and forgets them when the test says so."""

    def __init__(self) -> None:
        self.contents: dict[str, Content] = {}
        self.is_forgetting = asyncio.Event()
        self.may_forget = asyncio.Event()

    async def keep(self, content: Content) -> None:
        self.contents[content.id] = content

    async def oldest_contents(self, most_bytes: int) -> list[Content]:
        return list(self.contents.values())

    async def forget_contents(self, turn_ids: list[str]) -> int:
        self.is_forgetting.set()
        await self.may_forget.wait()
        return sum(len(self.contents.pop(turn_id).body) for turn_id in turn_ids)


class Database:
    def __init__(self) -> None:
        self.turn_ids: list[str] = []

    def sealed(self, workspace: str, turn_id: str, plain: bytes) -> bytes:
        return plain

    async def put(self, workspace: str, turn_id: str, at_ms: int, body: bytes) -> None:
        self.turn_ids.append(turn_id)


def turn_of(turn_id: str) -> Any:
    record = SimpleNamespace(id=turn_id, workspace="default", opened_at=datetime.now(UTC))
    plan = SimpleNamespace(num_bytes=100, prompt=Prompt([]))
    return SimpleNamespace(
        record=record, ask=SimpleNamespace(plan=plan), whole=[TextDelta("An answer")]
    )


async def test_what_comes_while_others_are_moved_is_moved_without_a_further_turn() -> None:
    """It stayed in the journal until the next turn of a workspace that keeps contents."""
    journal = SlowJournal()
    database = Database()
    clock = Clock()
    writer = ContentWriter(database, journal, Background(), clock)  # type: ignore[arg-type]

    async def keep(turn_id: str) -> None:
        content = await writer.sealed(turn_of(turn_id))
        assert content is not None
        await journal.keep(content)

    await keep("first")
    stopping = asyncio.Event()
    draining = asyncio.create_task(writer.drain(stopping))
    try:
        await journal.is_forgetting.wait()
        await keep("second")
        journal.may_forget.set()
        async with asyncio.timeout(30):
            while database.turn_ids != ["first", "second"]:
                await asyncio.sleep(0.01)
            while writer.waiting_bytes:
                await asyncio.sleep(0.01)
    finally:
        stopping.set()
        await draining
    assert journal.contents == {}
