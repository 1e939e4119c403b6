"""A worker that begins while others serve, beside a parent that the test plays."""

import asyncio
import socket
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.app import create_app
from gateway.base.link import Link
from gateway.cli.migrate import migrate
from gateway.http.machine import Place
from gateway.ledger.access import Keys
from gateway.ledger.database import open_ledgers
from gateway.turn.room import Room, make_room
from tests.gateway.serving import make_settings

KEY = "hf-revoked-key"


def test_a_key_that_was_revoked_while_a_worker_began_does_not_work_there(tmp_path: Path) -> None:
    """Nobody tells a worker of changes before it has begun, and it has read its keys before."""
    settings = make_settings(tmp_path)
    migrate(settings)

    async def run() -> tuple[bool, Any]:
        async with AsyncExitStack() as stack:
            keys = Keys(open_ledgers(stack, settings.ledger_url).access)
            key_id = await keys.create(KEY, "w", "k", datetime.now(UTC))
            app = create_app(settings, place=place)
            worked = False

            async def begun(_: bytes) -> list[object]:
                nonlocal worked
                worked = await app.state.services.keyring.find(KEY) is not None
                await keys.revoke(key_id, datetime.now(UTC))
                return []

            parent = await Link.over(ours, {"begun": begun})
            stack.callback(parent.close)
            async with app.lifespan():
                return worked, await app.state.services.keyring.find(KEY)

    ours, theirs = socket.socketpair()
    place = Place(1, 2, theirs, Room(make_room(2), 2))
    assert asyncio.run(run()) == (True, None)
