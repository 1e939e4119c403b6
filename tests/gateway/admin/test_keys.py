"""Keys on several gateways that share one database: revocation, rotation, expiry, last use."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from pydantic import SecretStr

from gateway.admission.keyring import KeyRing
from gateway.base.clock import Clock
from gateway.base.errors import LedgerUnavailable
from gateway.base.settings import DatabaseSettings
from gateway.ledger.access import Directory, Keys
from gateway.ledger.database import Ledger
from tests.gateway.admin_client import Admin
from tests.gateway.serving import (
    API_KEY,
    ask,
    eventually,
    make_settings,
    migrate,
    serve_gateway,
    soon_after,
)
from tests.postgres import new_database

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

    def ends(self, key: str) -> None:
        """It ends on the first at once, and on the other soon."""
        assert self.status(self.first, key) == 401
        eventually(lambda: self.status(self.second, key) == 401)


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    data: Path = tmp_path_factory.mktemp("keys")
    url = f"sqlite+aiosqlite:///{data / 'shared.db'}"
    if request.param == "postgres":
        url = new_database(request.getfixturevalue("postgres"), uuid4().hex)
    with ExitStack() as stack:
        gateways = [serve_gateway(data / n, "http://127.0.0.1:9", database_url=url) for n in "ab"]
        yield Pair(*map(stack.enter_context, gateways))


@pytest.fixture
def admin(pair: Pair) -> Admin:
    return Admin(pair.first)


@pytest.fixture
def workspace(admin: Admin) -> str:
    name = f"w{uuid4().hex}"
    admin.workspace(name)
    return name


def test_a_revoked_key_ends_here_at_once_and_on_the_other_gateway_soon(
    pair: Pair, admin: Admin, workspace: str
) -> None:
    key_id, key = admin.make_key(workspace)
    assert pair.statuses(key) == (200, 200)
    answer = admin.post(f"keys/{key_id}/revoke")
    assert answer["effective_within_seconds"] == 4 and not answer["info"]["is_active"]
    pair.ends(key)
    again = admin.post(f"keys/{key_id}/revoke")["info"]
    assert again["revoked_at"] == answer["info"]["revoked_at"], "once more changes nothing"
    assert pair.statuses(API_KEY) == (200, 200)
    (key_id,) = [key["id"] for key in admin.get("keys") if key["name"] == "configured"]
    admin.post(f"keys/{key_id}/revoke")
    pair.ends(API_KEY)


def test_an_archived_workspace_ends_its_keys_everywhere_until_it_is_restored(
    pair: Pair, admin: Admin, workspace: str
) -> None:
    _, key = admin.make_key(workspace)
    assert pair.statuses(key) == (200, 200)
    admin.post(f"workspaces/{workspace}/archive")
    pair.ends(key)
    admin.post(f"workspaces/{workspace}/restore")
    eventually(lambda: pair.statuses(key) == (200, 200))


def test_a_rotated_key_works_through_its_grace_and_its_successor_at_once(
    pair: Pair, admin: Admin, workspace: str
) -> None:
    old_id, old = admin.make_key(workspace, name="ci", scope="admin")
    successor = admin.post(f"keys/{old_id}/rotate", {"grace_seconds": 3600})
    new_id = successor["info"]["id"]
    new = successor["key"]
    assert new != old and new_id != old_id
    assert (successor["info"]["name"], successor["info"]["scope"]) == ("ci", "admin")
    assert successor["info"]["replaces"] == old_id
    assert pair.statuses(new) == (200, 200) and pair.statuses(old) == (200, 200)
    again = admin.post(f"keys/{old_id}/rotate", {}, status=400)["error"]["message"]
    assert new_id in again and new not in again
    admin.post(f"keys/{old_id}/revoke")
    pair.ends(old)
    newest = admin.post(f"keys/{new_id}/rotate", {"grace_seconds": 0})["key"]
    pair.ends(new)
    assert pair.statuses(newest) == (200, 200)
    assert admin.post(f"keys/{new_id}/rotate", {}, status=404)["error"]["type"]


def test_a_key_expires_by_itself_and_its_last_use_is_noted(
    pair: Pair, admin: Admin, workspace: str
) -> None:
    key_id, key = admin.make_key(workspace)

    def last_used() -> str | None:
        (listed,) = [k for k in admin.get(f"keys?workspace={workspace}") if k["id"] == key_id]
        value: str | None = listed["last_used_at"]
        return value

    assert last_used() is None
    before = datetime.now(UTC)
    assert pair.status(pair.second, key) == 200
    eventually(lambda: last_used() is not None)
    assert before <= datetime.fromisoformat(str(last_used())) <= datetime.now(UTC)
    end = soon_after(lambda: admin.make_key(workspace), 2)
    _, key = admin.make_key(workspace, expires_at=end.isoformat())
    eventually(lambda: datetime.now(UTC) > end)
    assert pair.statuses(key) == (401, 401)


def test_limits_set_on_one_gateway_reach_the_other(
    pair: Pair, admin: Admin, workspace: str
) -> None:
    """Where there is no engine every turn is a 529, which counts as a request."""
    _, key = admin.make_key(workspace)

    def limit() -> str | None:
        headers = ask(pair.second, key=key, model="m").headers
        return headers.get("anthropic-ratelimit-requests-limit")

    assert limit() is None
    admin.post(f"workspaces/{workspace}", {"requests_per_minute": 100_000})
    eventually(lambda: limit() == "100000")


class Held(Keys):
    """Once `holds`, the next directory is read and held back until it is let go."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.holds = False
        self.was_read = asyncio.Event()
        self.let_go = asyncio.Event()

    async def directory(self, limit: int, now: datetime, key_ids: list[str]) -> Directory:
        page = await super().directory(limit, now, key_ids)
        if self.holds and not self.was_read.is_set():
            self.was_read.set()
            await self.let_go.wait()
        return page


@dataclass
class Ring:
    """A gateway's keys, on a clock that tests move."""

    keys: Held
    seconds: float = 0.0
    ring: KeyRing = field(init=False)

    def __post_init__(self) -> None:
        clock = Clock(
            wall=lambda: NOW + timedelta(seconds=self.seconds), monotonic=lambda: self.seconds
        )
        configured = {"api_key": SecretStr("configured"), "keys_stale_seconds": 60}
        self.ring = KeyRing(self.keys, make_settings(Path("none"), **configured), clock)


@pytest.fixture
async def keyring(tmp_path: Path) -> AsyncIterator[Ring]:
    settings = DatabaseSettings(data=tmp_path)
    await asyncio.to_thread(migrate, settings)
    ledger = Ledger(settings.ledger_url)
    yield Ring(Held(ledger))
    await ledger.close()


@pytest.mark.anyio
async def test_while_the_database_is_away_keys_count_on_for_a_bounded_time(
    tmp_path: Path, keyring: Ring
) -> None:
    await keyring.keys.create("known", "w", "n", NOW)
    await keyring.ring.refresh()
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("ALTER TABLE watermarks RENAME TO gone")
        database.execute("ALTER TABLE api_keys RENAME TO away")
    keyring.seconds = 60
    with pytest.raises(LedgerUnavailable):
        await keyring.ring.poll()
    assert await keyring.ring.find("known") is not None
    keyring.seconds = 61
    with pytest.raises(LedgerUnavailable):
        await keyring.ring.find("known")
    assert await keyring.ring.find("configured") is not None
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("ALTER TABLE gone RENAME TO watermarks")
        database.execute("ALTER TABLE away RENAME TO api_keys")
    await keyring.ring.poll()
    assert await keyring.ring.find("known") is not None


@pytest.mark.anyio
async def test_a_refresh_that_read_before_a_revocation_does_not_undo_it(keyring: Ring) -> None:
    keyring.keys.holds = True
    key_id = await keyring.keys.create("key", "w", "n", NOW)
    early = asyncio.create_task(keyring.ring.refresh())
    await keyring.keys.was_read.wait()
    await keyring.keys.revoke(key_id, NOW)
    late = asyncio.create_task(keyring.ring.refresh())
    while not (late.done() or keyring.ring._refreshing.locked()):
        await asyncio.sleep(0.01)
    keyring.keys.let_go.set()
    await asyncio.gather(early, late)
    assert await keyring.ring.find("key") is None
