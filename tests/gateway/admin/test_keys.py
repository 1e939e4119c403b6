"""Keys on several gateways that share one database: revocation, rotation, expiry, last use."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from gateway.base.clock import Clock
from gateway.base.errors import LedgerUnavailable
from gateway.base.settings import DatabaseSettings
from gateway.ledger.access import Directory, Keys
from gateway.ledger.database import Ledger
from gateway.limits.keyring import KeyRing
from tests.gateway.admin_client import Admin
from tests.gateway.serving import API_KEY, eventually, migrate, serve_gateway, soon_after

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass
class Pair:
    """Two gateways with one database; no engine is there, nor needed to list models."""

    first: str
    second: str

    def status(self, url: str, key: str) -> int:
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return httpx.get(f"{url}/v1/models", headers=headers, timeout=120).status_code

    def statuses(self, key: str) -> tuple[int, int]:
        return self.status(self.first, key), self.status(self.second, key)


@pytest.fixture
def pair(tmp_path: Path, shared_database: str) -> Iterator[Pair]:
    with ExitStack() as stack:
        urls = [
            stack.enter_context(
                serve_gateway(tmp_path / name, "http://127.0.0.1:9", database_url=shared_database)
            )
            for name in ("first", "second")
        ]
        yield Pair(*urls)


def test_a_revoked_key_ends_here_at_once_and_on_the_other_gateway_soon(pair: Pair) -> None:
    admin = Admin(pair.first)
    admin.workspace("w")
    key_id, key = admin.make_key("w")
    assert pair.statuses(key) == (200, 200)
    answer = admin.post(f"keys/{key_id}/revoke")
    assert answer["effective_within_seconds"] == 4 and not answer["info"]["is_active"]
    assert pair.status(pair.first, key) == 401
    eventually(lambda: pair.status(pair.second, key) == 401)
    again = admin.post(f"keys/{key_id}/revoke")["info"]
    assert again["revoked_at"] == answer["info"]["revoked_at"], "once more changes nothing"


def test_an_archived_workspace_ends_its_keys_everywhere_until_it_is_restored(pair: Pair) -> None:
    admin = Admin(pair.first)
    admin.workspace("w")
    _, key = admin.make_key("w")
    assert pair.statuses(key) == (200, 200)
    admin.post("workspaces/w/archive")
    assert pair.status(pair.first, key) == 401
    eventually(lambda: pair.status(pair.second, key) == 401)
    admin.post("workspaces/w/restore")
    eventually(lambda: pair.statuses(key) == (200, 200))


def test_a_rotated_key_works_through_its_grace_and_its_successor_at_once(pair: Pair) -> None:
    admin = Admin(pair.first)
    admin.workspace("w")
    old_id, old = admin.make_key("w", name="ci", scope="admin")
    made = admin.post(f"keys/{old_id}/rotate", {"grace_seconds": 3600})
    new_id, new = made["info"]["id"], made["key"]
    assert new != old and new_id != old_id
    assert (made["info"]["name"], made["info"]["scope"]) == ("ci", "admin")
    assert made["info"]["replaces"] == old_id
    assert pair.statuses(new) == (200, 200) and pair.statuses(old) == (200, 200)
    again = admin.post(f"keys/{old_id}/rotate", {}, status=400)["error"]["message"]
    assert new_id in again and new not in again
    admin.post(f"keys/{old_id}/revoke")
    eventually(lambda: pair.statuses(old) == (401, 401))
    assert pair.statuses(new) == (200, 200)


def test_without_grace_the_old_key_ends_with_the_rotation(pair: Pair) -> None:
    admin = Admin(pair.first)
    admin.workspace("w")
    old_id, old = admin.make_key("w")
    assert pair.status(pair.second, old) == 200
    new = admin.post(f"keys/{old_id}/rotate", {"grace_seconds": 0})["key"]
    assert pair.status(pair.first, old) == 401
    eventually(lambda: pair.statuses(old) == (401, 401))
    assert pair.statuses(new) == (200, 200)
    assert admin.post(f"keys/{old_id}/rotate", {}, status=404)["error"]["type"]


def test_a_key_expires_by_itself(pair: Pair) -> None:
    admin = Admin(pair.first)
    admin.workspace("w")
    end = soon_after(lambda: admin.make_key("w"), 2)
    _, key = admin.make_key("w", expires_at=end.isoformat())
    eventually(lambda: datetime.now(UTC) > end)
    assert pair.statuses(key) == (401, 401)


def test_when_a_key_was_last_used_is_noted(pair: Pair) -> None:
    admin = Admin(pair.first)
    admin.workspace("w")
    key_id, key = admin.make_key("w")

    def last_used() -> str | None:
        (found,) = [k for k in admin.get("keys?workspace=w") if k["id"] == key_id]
        value: str | None = found["last_used_at"]
        return value

    assert last_used() is None
    before = datetime.now(UTC)
    assert pair.status(pair.second, key) == 200
    eventually(lambda: last_used() is not None)
    assert before <= datetime.fromisoformat(str(last_used())) <= datetime.now(UTC)


def test_the_configured_key_can_be_revoked_too(pair: Pair) -> None:
    admin = Admin(pair.first)
    assert pair.statuses(API_KEY) == (200, 200)
    (key_id,) = [key["id"] for key in admin.get("keys") if key["name"] == "configured"]
    admin.post(f"keys/{key_id}/revoke")
    assert pair.status(pair.first, API_KEY) == 401
    eventually(lambda: pair.status(pair.second, API_KEY) == 401)


def test_limits_set_on_one_gateway_reach_the_other(pair: Pair) -> None:
    """Where there is no engine every turn is a 529, which counts as a request."""
    admin = Admin(pair.first)
    admin.workspace("w")
    _, key = admin.make_key("w")
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}

    def limit() -> str | None:
        reply = httpx.post(f"{pair.second}/v1/messages", json=asked, headers=headers, timeout=120)
        found: str | None = reply.headers.get("anthropic-ratelimit-requests-limit")
        return found

    assert limit() is None
    admin.post("workspaces/w", {"requests_per_minute": 100_000})
    eventually(lambda: limit() == "100000")


class Moving:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.clock = Clock(
            wall=lambda: NOW + timedelta(seconds=self.seconds), monotonic=lambda: self.seconds
        )


@pytest.fixture
def migrated(tmp_path: Path) -> DatabaseSettings:
    settings = DatabaseSettings(data=tmp_path)
    migrate(settings)
    return settings


@pytest.mark.anyio
async def test_while_the_database_is_away_keys_count_on_for_a_bounded_time(
    tmp_path: Path, migrated: DatabaseSettings
) -> None:
    time, ledger = Moving(), Ledger(migrated.ledger_url)
    keys = Keys(ledger)
    await keys.create("known", "w", "n", NOW)
    configured = SecretStr("configured")
    ring = KeyRing(keys, SecretStr("master"), time.clock, configured, max_stale_seconds=60)
    await ring.refresh()
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("ALTER TABLE watermarks RENAME TO gone")
        database.execute("ALTER TABLE api_keys RENAME TO away")
    time.seconds = 60
    with pytest.raises(LedgerUnavailable):
        await ring.poll()
    assert await ring.find("known") is not None
    time.seconds = 61
    with pytest.raises(LedgerUnavailable):
        await ring.find("known")
    assert await ring.find("configured") is not None
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("ALTER TABLE gone RENAME TO watermarks")
        database.execute("ALTER TABLE away RENAME TO api_keys")
    await ring.poll()
    assert await ring.find("known") is not None
    await ledger.close()


@pytest.mark.anyio
async def test_the_database_is_asked_for_one_number_until_it_has_grown(
    tmp_path: Path, migrated: DatabaseSettings
) -> None:
    time, ledger = Moving(), Ledger(migrated.ledger_url)
    keys = Keys(ledger)
    ring = KeyRing(keys, SecretStr("master"), time.clock, None, max_stale_seconds=60)
    await ring.refresh()
    # Behind the back of the watermark, as nothing but a test does.
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("INSERT INTO workspaces (id, created_at) VALUES ('w', '2026-11-21')")
    await ring.poll()
    assert "w" not in ring.workspaces
    await keys.create("key", "w", "n", NOW)
    await ring.poll()
    assert "w" in ring.workspaces
    await ledger.close()


class Held(Keys):
    """The first directory is read, and held back until it is let go."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.was_read, self.let_go = asyncio.Event(), asyncio.Event()

    async def directory(self, limit: int, now: datetime, asked: list[str]) -> Directory:
        found = await super().directory(limit, now, asked)
        if not self.was_read.is_set():
            self.was_read.set()
            await self.let_go.wait()
        return found


@pytest.mark.anyio
async def test_a_refresh_that_read_before_a_revocation_does_not_undo_it(
    migrated: DatabaseSettings,
) -> None:
    time, ledger = Moving(), Ledger(migrated.ledger_url)
    keys = Held(ledger)
    key_id = await keys.create("key", "w", "n", NOW)
    ring = KeyRing(keys, SecretStr("master"), time.clock, None, max_stale_seconds=60)
    early = asyncio.create_task(ring.refresh())
    await keys.was_read.wait()
    await keys.revoke(key_id, NOW)
    late = asyncio.create_task(ring.refresh())
    while not (late.done() or ring._refreshing.locked()):
        await asyncio.sleep(0.01)
    keys.let_go.set()
    await asyncio.gather(early, late)
    assert await ring.find("key") is None
    await ledger.close()


@pytest.mark.anyio
async def test_a_wrong_key_is_looked_up_once_in_five_seconds(migrated: DatabaseSettings) -> None:
    time, ledger = Moving(), Ledger(migrated.ledger_url)
    keys = Keys(ledger)
    ring = KeyRing(keys, SecretStr("master"), time.clock, None, max_stale_seconds=60)
    assert await ring.find("late") is None
    await keys.create("late", "w", "n", NOW)
    time.seconds = 4.9
    assert await ring.find("late") is None
    time.seconds = 5.1
    assert await ring.find("late") is not None
    await ledger.close()
