"""What the ledger keeps of each turn beside its tokens, in both dialects."""

import contextlib
import sqlite3
from typing import Any

from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.serving import eventually

TEXT = "The staff must file every form before noon. " * 20


def row_of(stack: Stack, turn_id: str) -> dict[str, Any]:
    def find() -> dict[str, Any] | None:
        with contextlib.closing(sqlite3.connect(stack.data / "ledger.db")) as db:
            db.row_factory = sqlite3.Row
            row = db.execute("SELECT * FROM turns WHERE id = ?", (turn_id,)).fetchone()
        return None if row is None else dict(row)

    eventually(lambda: find() is not None)
    details = find()
    assert details is not None
    return details


def marked(ttl: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": ttl}}]


def test_the_deepest_marked_prefix_has_one_name_in_both_dialects(stack: Stack) -> None:
    with stack.http() as http:
        first = http.post("/v1/messages", json=body(system=marked("1h"))).json()
        plain = http.post("/v1/messages", json=body()).json()
    chat = stack.openai().chat.completions.create(
        model="scripted",
        messages=[
            {"role": "system", "content": marked("5m")},  # type: ignore[list-item, misc]
            {"role": "user", "content": "Hello"},
        ],
    )
    row = row_of(stack, first["id"])
    chat_row = row_of(stack, "msg_" + chat.id.removeprefix("chatcmpl-"))
    assert (row["dialect"], row["prefix_ttl"]) == ("anthropic", "1h")
    assert (chat_row["dialect"], chat_row["prefix_ttl"]) == ("openai", "5m")
    (name,) = {n.digest for n in stack.engine.requests[0].names if n.segment == 0}
    assert row["prefix"] == chat_row["prefix"] == name and len(name) == 16
    assert row_of(stack, plain["id"])["prefix"] is None
