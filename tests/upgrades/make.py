"""What an installation of the commit at hand leaves behind, for the tests of upgrades.

    git worktree add /tmp/old COMMIT
    cd /tmp/old && PYTHONPATH=. python HERE/tests/upgrades/make.py HERE/tests/upgrades/COMMIT.tar.xz

It packs a ledger, a journal as a killed gateway leaves it, an engine's store, and `figures.json`:
what that commit says of all of it. It uses what the commit itself has: its servers, its admin API,
its journal and its store.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from anthropic import Anthropic

from gateway.base.record import TurnRecord
from gateway.journal.store import Journal
from scripts.stack import ADMIN_KEY, API_KEY, running_stack
from tests.engine.store.engines import PREFIX, MovedWall, StoredEngine

HOUR_MS = 3_600_000
WORD = "Flussuferläufer"
RULES = f"The house of {WORD}: nobody sleeps on the stairs. " * 150


def system(text: str, ttl: str = "5m") -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}]


def ask(sdk: Anthropic, text: str, question: str, **changes: Any) -> str:
    messages = [{"role": "user", "content": question}]
    request: Any = {"model": "synthetic", "max_tokens": 5, "messages": messages, **changes}
    return sdk.messages.create(system=system(text), **request).id


def use(url: str, admin: httpx.Client) -> dict[str, str]:
    """A few turns of each kind; the ids that they are found by."""
    reply = admin.post("workspaces", json={"id": "keeping", "keep_days": 3000})
    reply.raise_for_status()
    key = admin.post("keys", json={"workspace": "keeping", "name": "kept"}).json()["key"]
    ids: dict[str, str] = {}
    with Anthropic(base_url=url, api_key=API_KEY) as sdk:
        ids["first"] = ask(sdk, RULES, "one")
        ids["second"] = ask(sdk, RULES, "two")
        rows = [
            {"custom_id": f"row-{number}", "params": params}
            for number in range(3)
            for params in [
                {
                    "model": "synthetic",
                    "max_tokens": 3,
                    "system": system(RULES),
                    "messages": [{"role": "user", "content": f"row {number}"}],
                }
            ]
        ]
        batch: Any = sdk.messages.batches.create(requests=rows)  # type: ignore[arg-type]
        while batch.processing_status != "ended":
            time.sleep(0.2)
            batch = sdk.messages.batches.retrieve(batch.id)
        ids["batch"] = batch.id
    with Anthropic(base_url=url, api_key=key) as sdk:
        ids["kept"] = ask(sdk, RULES, f"Where is {WORD}?")
    gemini = {
        "model": "models/synthetic",
        "displayName": "rules",
        "contents": [{"role": "user", "parts": [{"text": RULES}]}],
        "ttl": "600000s",
    }
    content = httpx.post(
        f"{url}/v1beta/cachedContents", json=gemini, headers={"x-api-key": API_KEY}, timeout=60
    )
    ids["content"] = content.raise_for_status().json()["name"].partition("/")[2]
    answer = httpx.post(
        f"{url}/v1/responses",
        json={"model": "synthetic", "input": f"Where is {WORD}?", "max_output_tokens": 4},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )
    ids["response"] = answer.raise_for_status().json()["id"]
    ids["key"] = key
    return ids


def questions(ids: dict[str, str], since_ms: int) -> dict[str, tuple[str, str]]:
    """What is asked of the gateway before and after the upgrade: a path and the key for it."""
    span = f"since_ms={since_ms}&until_ms={since_ms + 4 * HOUR_MS}"
    admin = [
        "workspaces",
        "keys",
        f"turns?{span}",
        *(f"turns/{ids[name]}" for name in ("first", "second", "kept")),
        f"turns/{ids['kept']}/content",
        f"usage?{span}",
        f"usage/groups?{span}&group_by=model",
        f"latency?{span}",
        f"savings?{span}",
        f"prefixes?{span}&workspace=default",
    ]
    keys = {f"/admin/v1/{path}": ADMIN_KEY for path in admin}
    keys |= {
        f"/v1/messages/batches/{ids['batch']}": API_KEY,
        f"/v1/messages/batches/{ids['batch']}/results": API_KEY,
        "/v1beta/cachedContents": API_KEY,
        f"/v1/responses/{ids['response']}": ids["key"],
        f"/v1/responses/{ids['response']}/input_items": ids["key"],
    }
    return {path: (path, key) for path, key in keys.items()}


def make_ledger(data: Path) -> dict[str, Any]:
    settings = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "0"}
    since_ms = int(time.time() * 1000) // HOUR_MS * HOUR_MS
    with running_stack(data, "synthetic", settings) as stack:
        base = f"{stack.gateway}/admin/v1/"
        with httpx.Client(base_url=base, headers={"x-api-key": ADMIN_KEY}, timeout=60) as admin:
            ids = use(stack.gateway, admin)
            while httpx.get(f"{stack.gateway}/readyz").json()["journal_backlog"]:
                time.sleep(0.2)
            time.sleep(2)  # what is written behind an answer
        at = datetime.now(UTC)
        answers = {}
        for path, key in questions(ids, since_ms).values():
            headers = {"x-api-key": key, "authorization": f"Bearer {key}"}
            reply = httpx.get(stack.gateway + path, headers=headers, timeout=60)
            assert reply.status_code == 200, (path, reply.text)
            is_lines = path.endswith("/results")
            lines = [json.loads(line) for line in reply.text.splitlines()] if is_lines else None
            answers[path] = {"key": key, "answer": lines or reply.json()}
    figures = {"at": at.isoformat(), "url": stack.gateway, "ids": ids, "word": WORD}
    return {**figures, "answers": answers}


def turn(number: int, instance: str, at: datetime) -> TurnRecord:
    return TurnRecord(
        id=f"msg_{instance}{number:016x}",
        instance=instance,
        workspace="default",
        key_id="key_of_the_journal",
        model="synthetic",
        stream=False,
        opened_at=at,
        engine="engine-0",
        epoch="e1",
    )


def make_journal(data: Path, at: datetime) -> None:
    """Two closed turns, one that is open and one that was set aside, and then a kill."""

    async def fill() -> None:
        journal = Journal(data / "journal").start()
        records = [turn(number, journal.instance, at) for number in range(4)]
        for record in records:
            await journal.open(record)
        for number, record in enumerate(records[:2]):
            record.outcome = "end_turn"
            record.status = 200
            record.input_tokens = 100 + number
            record.cache_read_tokens = 1000 + number
            record.output_tokens = 7 + number
            record.price = "synthetic@2026-01-01"
            record.cost = 11
            record.cost_without_cache = 22
            await journal.close(record)
        await journal.set_aside([records[2].id], "lost")
        os._exit(0)

    asyncio.run(fill())


def make_store(path: Path) -> dict[str, Any]:
    wall = MovedWall()
    engine = StoredEngine(path, wall=wall)
    sent = engine.say(PREFIX)
    engine.settle()
    engine.end()
    assert sent.started is not None
    return {"wall": wall.wall, "written_1h_tokens": sent.started.usage.cache_write_1h_tokens}


def main() -> None:
    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        figures = make_ledger(root / "data")
        at = datetime.fromisoformat(figures["at"])
        context = multiprocessing.get_context("fork")
        dying = context.Process(target=make_journal, args=(root / "data", at))
        dying.start()
        dying.join()
        figures["store"] = make_store(root / "store")
        (root / "figures.json").write_text(json.dumps(figures, ensure_ascii=False))
        with tarfile.open(target, "w:xz") as archive:
            for member in ("data", "store", "figures.json"):
                archive.add(root / member, member)


if __name__ == "__main__":
    main()
