"""Prompts and answers that workspaces keep: encrypted, for as long as they say, and not longer."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import event, func, select

from gateway.base.errors import NotFound
from gateway.ledger.access import Workspaces
from gateway.ledger.cached_contents import CachedContents
from gateway.ledger.contents import DAY_MS, Contents
from gateway.ledger.database import Ledger
from gateway.ledger.schema import KeptResponseRow, TurnContentRow
from gateway.ledger.upkeep import retain

NOW = datetime(2026, 11, 26, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
PLAIN = b"The patient's name is Rose."
MASTER = SecretStr("a master secret of the tests")


class Kept:
    """A ledger with the workspaces `a`, which keeps for three days, and `b`, which does not."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.contents = Contents(ledger, MASTER)
        self.workspaces = Workspaces(ledger)

    async def put(self, workspace: str, turn_id: str, age_ms: int) -> None:
        body = self.contents.sealed(workspace, turn_id, PLAIN)
        assert PLAIN not in body
        await self.contents.put(workspace, turn_id, NOW_MS - age_ms, body)

    async def read(self, workspace: str, turn_id: str) -> bytes | None:
        try:
            body, until_ms = await self.contents.get(workspace, turn_id, NOW_MS)
        except NotFound:
            return None
        assert until_ms > NOW_MS
        return self.contents.opened(workspace, turn_id, body)

    async def count(self) -> int:
        ((number,),) = await self.ledger.rows(select(func.count()).select_from(TurnContentRow))
        return int(number)


@pytest.fixture
async def kept(ledger: Ledger) -> Kept:
    stores = Kept(ledger)
    await stores.workspaces.create("a", NOW, {"keep_days": 3})
    await stores.workspaces.create("b", NOW, {})
    return stores


@pytest.mark.anyio
async def test_what_is_kept_ends_to_the_millisecond_and_is_deleted(kept: Kept) -> None:
    await kept.put("a", "msg_new", 3 * DAY_MS - 1)
    await kept.put("a", "msg_old", 3 * DAY_MS)
    await kept.put("b", "msg_none", 0)
    assert await kept.read("a", "msg_new") == PLAIN
    assert await kept.read("b", "msg_new") is None, "another workspace's"
    assert await kept.read("a", "msg_old") is None and await kept.read("b", "msg_none") is None
    assert await kept.count() == 3
    await kept.contents.forget(NOW_MS)
    assert await kept.count() == 1 and await kept.read("a", "msg_new") == PLAIN
    # Fewer days count at once, also for what came before.
    await kept.workspaces.change("a", {"keep_days": 2})
    assert await kept.read("a", "msg_new") is None
    await kept.contents.forget(NOW_MS)
    assert await kept.count() == 0


@pytest.mark.anyio
async def test_responses_are_kept_as_long_as_workspace_or_installation_says(kept: Kept) -> None:
    kept.contents = Contents(kept.ledger, MASTER, KeptResponseRow, 30)
    for workspace, days in (("a", 3), ("b", 30)):
        await kept.put(workspace, f"resp_new_{workspace}", days * DAY_MS - 1)
        await kept.put(workspace, f"resp_old_{workspace}", days * DAY_MS)
    for workspace, neighbour in ("ab", "ba"):
        assert await kept.read(workspace, f"resp_new_{workspace}") == PLAIN
        assert await kept.read(workspace, f"resp_new_{neighbour}") is None
        assert await kept.read(workspace, f"resp_old_{workspace}") is None
    await kept.contents.forget(NOW_MS)
    rows = await kept.ledger.rows(select(KeptResponseRow.turn_id))
    assert {row[0] for row in rows} == {"resp_new_a", "resp_new_b"}
    assert await kept.count() == 0, "no turn's content is there"
    off = Contents(kept.ledger, MASTER, KeptResponseRow)
    assert not await off.find("b", ["resp_new_b"], NOW_MS)
    await off.forget(NOW_MS)
    rows = await kept.ledger.rows(select(KeptResponseRow.turn_id))
    assert [row[0] for row in rows] == ["resp_new_a"]


@pytest.mark.anyio
async def test_retention_of_turns_deletes_what_was_kept_of_them(kept: Kept) -> None:
    await kept.put("a", "msg_new", 0)
    await kept.put("a", "msg_old", 2 * DAY_MS)
    await retain(kept.ledger, NOW_MS - DAY_MS, 0, 0)
    assert await kept.count() == 1 and await kept.read("a", "msg_new") == PLAIN


@pytest.mark.parametrize(
    ("workspace", "turn_id", "master"),
    [("b", "msg_1", MASTER), ("a", "msg_2", MASTER), ("a", "msg_1", SecretStr("another one"))],
)
def test_a_body_is_read_in_its_own_place_alone(
    workspace: str, turn_id: str, master: SecretStr
) -> None:
    ledger: Any = None
    body = Contents(ledger, MASTER).sealed("a", "msg_1", PLAIN)
    assert Contents(ledger, MASTER).opened("a", "msg_1", body) == PLAIN
    with pytest.raises(NotFound):
        Contents(ledger, master).opened(workspace, turn_id, body)


@pytest.mark.anyio
async def test_a_cached_content_is_looked_at_without_its_body(ledger: Ledger) -> None:
    """The body counts as the request's before it is read."""
    statements: list[str] = []
    event.listen(
        ledger.engine.sync_engine,
        "before_cursor_execute",
        lambda *called: statements.append(str(called[2])),
    )
    contents = CachedContents(ledger, MASTER, 10, 1 << 20)
    with pytest.raises(NotFound):
        await contents.get("a", "cachedContents/none", NOW)
    assert not any("body" in statement for statement in statements), statements
    with pytest.raises(NotFound):
        await contents.with_body("a", "cachedContents/none", NOW)
    assert any("body" in statement for statement in statements)
