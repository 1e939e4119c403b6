"""A client's word is nowhere in the clear: in no table, file or log, whatever route it came by.

Bytes that are a zlib stream are searched as what they unfold to. An engine's store has tokens, by
design, and no text.
"""

import json
import re
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from scripts.stack import ADMIN_KEY, API_KEY, running_stack
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.serving import eventually
from tests.isolation.probes import ENGINE, MODEL

PLAIN = {"HOLDFAST_LOG_LEVEL": "debug", "HOLDFAST_RESPONSE_DAYS": "30"}

HEADS = re.compile(b"\x78[\x01\x5e\x9c\xda]")
"""The two bytes that zlib writes first, at any level."""
PIECE_BYTES = 1 << 16


def bodies(word: str) -> dict[str, dict[str, Any]]:
    """A request of each dialect, by its path."""
    long = f"{word} " * 300
    user = [{"role": "user", "content": f"{word}?"}]
    messages = {"model": MODEL, "max_tokens": 4, "system": long, "messages": user}
    parts = [{"role": "user", "parts": [{"text": long}]}]
    return {
        "/v1/messages": messages,
        "/v1/messages/count_tokens": {"model": MODEL, "messages": user},
        "/v1/chat/completions": {"model": MODEL, "max_tokens": 4, "messages": user},
        "/v1/completions": {"model": MODEL, "max_tokens": 4, "prompt": long},
        "/v1/responses": {"model": MODEL, "max_output_tokens": 4, "input": long},
        "/v1/responses/input_tokens": {"model": MODEL, "input": long},
        "/v1/conversations": {"items": [{"type": "message", "role": "user", "content": long}]},
        f"/v1beta/models/{MODEL}:generateContent": {
            "contents": parts,
            "generationConfig": {"maxOutputTokens": 4},
        },
        f"/v1beta/models/{MODEL}:countTokens": {"contents": parts},
        "/v1beta/interactions": {
            "model": MODEL,
            "input": long,
            "generation_config": {"max_output_tokens": 4},
        },
        "/v1beta/cachedContents": {"model": f"models/{MODEL}", "contents": parts, "ttl": "600s"},
        "/v1/messages/batches": {
            "requests": [{"custom_id": f"row-{n}", "params": messages} for n in range(3)]
        },
    }


def post(url: str, path: str, body: Any, key: str = API_KEY) -> httpx.Response:
    headers = {"x-api-key": key, "authorization": f"Bearer {key}"}
    headers["anthropic-version"] = "2023-06-01"
    return httpx.post(url + path, json=body, headers=headers, timeout=120, trust_env=False)


def ask_by_every_route(url: str, word: str, key: str) -> None:
    """Each body as it is, then spoilt: what is refused is no more told."""
    for path, body in bodies(word).items():
        reply = post(url, path, body, key)
        assert reply.status_code == 200, (path, reply.text)
        spoilt = json.dumps(body)[:-1] + f', "{word}": [{{"{word}": "{word}"}}]}}'
        assert post(url, path, json.loads(spoilt), key).status_code in (200, 400), path
        if path == "/v1/messages/batches":
            batch = f"{url}/v1/messages/batches/{reply.json()['id']}"
            eventually(lambda batch=batch: has_ended(batch, key))
            results = httpx.get(f"{batch}/results", headers={"x-api-key": key}, timeout=120)
            kinds = [json.loads(line)["result"]["type"] for line in results.text.splitlines()]
            assert kinds == ["succeeded"] * 3


def has_ended(batch: str, key: str) -> bool:
    reply = httpx.get(batch, headers={"x-api-key": key}, timeout=120)
    return bool(reply.json()["processing_status"] == "ended")


def unfolded(content: bytes) -> Iterator[bytes]:
    """The bytes, and what each zlib stream in them unfolds to."""
    yield content
    for head in HEADS.finditer(content):
        piece = content[head.start() : head.start() + PIECE_BYTES]
        try:
            yield zlib.decompressobj().decompress(piece, PIECE_BYTES)
        except zlib.error:
            pass


def cells_of(database: str) -> bytes:
    """All that the tables have."""
    if database.startswith("postgresql"):
        with psycopg.connect(database.replace("+psycopg", "")) as connection:
            query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            tables = [name for (name,) in connection.execute(query)]
            cells = [
                cell
                for table in tables
                for row in connection.execute(f'SELECT * FROM "{table}"'.encode())
                for cell in row
            ]
    else:
        with closing(sqlite3.connect(database.partition(":///")[2])) as connection:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = [name for (name,) in connection.execute(query)]
            cells = [
                cell
                for table in tables
                for row in connection.execute(f'SELECT * FROM "{table}"')
                for cell in row
            ]
    return b"\n".join(c if isinstance(c, bytes) else str(c).encode() for c in cells)


def places(folder: Path, database: str) -> dict[str, bytes]:
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {**files, "tables": cells_of(database)}


def finds(contents: dict[str, bytes], words: Collection[str]) -> list[str]:
    """The places that have one of the words."""
    return [
        place
        for place, content in contents.items()
        if any(word.encode() in piece for piece in unfolded(content) for word in words)
    ]


@pytest.mark.parametrize(
    "shared_database",
    ["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.slow])],
    indirect=True,
)
def test_a_clients_word_is_nowhere_in_the_clear(tmp_path: Path, shared_database: str) -> None:
    """Of a workspace that keeps nothing, and of one that keeps for a month."""
    words = {keep_days: f"canary{uuid4().hex}" for keep_days in (None, 30)}
    data = tmp_path / "data"
    (tmp_path / "logs").mkdir()
    engine_settings = {
        **ENGINE,
        "ENGINE_MODEL": str(write_tiny_model(tmp_path / "tiny")),
        "ENGINE_STORE": str(tmp_path / "store"),
    }
    with running_stack(
        data,
        engine_settings=engine_settings,
        gateway_settings={**PLAIN, "HOLDFAST_DATABASE_URL": shared_database},
        logs=tmp_path / "logs",
    ) as stack:
        for keep_days, word in words.items():
            workspace = {"id": f"keeps-{keep_days}".lower(), "keep_days": keep_days}
            reply = post(stack.gateway, "/admin/v1/workspaces", workspace, ADMIN_KEY)
            assert reply.status_code == 200, reply.text
            key = {"workspace": workspace["id"], "name": "k"}
            reply = post(stack.gateway, "/admin/v1/keys", key, ADMIN_KEY)
            ask_by_every_route(stack.gateway, word, reply.json()["key"])
        time.sleep(1)  # what is written behind an answer
        assert finds(places(tmp_path, shared_database), words.values()) == []
        for path in (data / "journal").glob("journal.db*"):
            assert path.stat().st_mode & 0o777 == 0o600, path
    contents = places(tmp_path, shared_database)
    assert finds(contents, words.values()) == []
    assert b"batch_rows" in contents["tables"] or b"row-2" in contents["tables"]
    for word in words.values():
        hidden = b"xx" + zlib.compress(f"a {word}".encode())
        assert finds({"a place": hidden}, words.values()) == ["a place"], (
            "a compressed word is found"
        )
