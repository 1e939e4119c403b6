"""How an engine's event stream is followed, over real sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.protocol import ChainGone, ChainHeld, EventFrame, HeldName, Snapshot
from tests.gateway.admin_client import Admin
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve, serve_gateway


def held(seq: int, *names: str) -> ChainHeld:
    return ChainHeld(seq=seq, names=[HeldName(name, 16) for name in names])


@dataclass
class TellingEngine(ScriptedEngine):
    """Each connection to `/v1/events` gets the next of the `tales` and is then ended; the last one
    is told again and again. `queries` are theirs."""

    tales: list[list[EventFrame | bytes]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/events":
            return await super().__call__(scope, receive, send)
        tale = self.tales[min(len(self.queries), len(self.tales) - 1)]
        self.queries.append(scope["query_string"].decode())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for frame in tale:
            line = frame if isinstance(frame, bytes) else msgspec.json.encode(frame) + b"\n"
            # In two pieces: lines are not chunks.
            for piece in (line[:7], line[7:]):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@contextmanager
def followed(tmp_path: Path, engine: TellingEngine) -> Iterator[Admin]:
    with serve(engine) as url, serve_gateway(tmp_path, url) as gateway:
        yield Admin(gateway)


def names(admin: Admin) -> int:
    (engine,) = admin.get("engines")
    count: int = engine["routing"]["names"]
    return count


def test_a_missing_event_is_asked_for_again_from_the_last_one(tmp_path: Path) -> None:
    engine = TellingEngine(
        tales=[
            [Snapshot(seq=4, epoch="epoch-1", chains=[held(4, "a")]), held(6, "c")],
            [held(5, "b"), held(6, "c"), ChainGone(seq=7, names=["a"], reason="evicted")],
            [],
        ]
    )
    with followed(tmp_path, engine) as admin:
        eventually(lambda: len(engine.queries) >= 3)
        assert engine.queries[:3] == ["", "epoch=epoch-1&after=4", "epoch=epoch-1&after=7"]
        assert names(admin) == 2
