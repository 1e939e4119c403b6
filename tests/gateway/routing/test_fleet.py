"""Engines that join a fleet, and purges that engines have done."""

from contextlib import aclosing
from datetime import UTC, datetime

import pytest
from structlog.testing import capture_logs

from engine.supervisor import Supervisor
from gateway.base.errors import InvalidRequest, LedgerUnavailable
from gateway.routing.client import EngineHttp
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.model_ids import ModelIds
from gateway.routing.pending_purges import PendingPurges
from gateway.structs.fleet import PendingPurge

pytestmark = pytest.mark.anyio


async def test_a_refused_name_is_called_by_itself_also_if_discovery_gave_it() -> None:
    async with aclosing(EngineHttp()) as http:
        fleet = Fleet(
            ["pod-0=http://127.0.0.1:1"],
            lambda name, url: Engine(name, url, "secret", http),
            Supervisor(),
            ModelIds(None, lambda: datetime.now(UTC)),
        )
        with pytest.raises(InvalidRequest, match="another engine has the name `pod-0` already"):
            await fleet.add("http://127.0.0.1:2", "pod-0")
        with pytest.raises(InvalidRequest, match="url: `pod 0` can't be an engine's name"):
            await fleet.add("http://127.0.0.1:2", "pod 0")
    assert [engine.name for engine in fleet.engines] == ["pod-0"]


class _TableWithoutRemoval:
    """A table of pending purges whose database is away for removals."""

    async def all(self) -> list[PendingPurge]:
        return []

    async def add(self, purge: PendingPurge) -> None:
        """Do nothing: the purge is known in memory."""

    async def remove(self, purge: PendingPurge) -> None:
        raise LedgerUnavailable("the database is away")


async def test_a_purge_that_was_done_and_could_not_be_removed_is_logged_as_that() -> None:
    purges = PendingPurges(_TableWithoutRemoval())
    purge = PendingPurge(engine="engine-0", scope="scope", workspace="default", asked_ms=1)
    await purges.add(purge)
    with capture_logs() as logged:
        await purges.done(purge)
    assert [(line["event"], line["error"]) for line in logged] == [
        ("pending_purge_not_removed", "the database is away")
    ]
    assert not purges.of("engine-0")
