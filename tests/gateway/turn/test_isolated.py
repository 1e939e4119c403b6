"""Each answer of an engine that may not keep workspaces apart says so."""

from pathlib import Path

import httpx
import pytest

from engine.protocol.reports import Guarantee
from tests.gateway.bodies import body
from tests.gateway.openai_bodies import MESSAGES, MODEL
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import HEADERS, serve, serve_gateway

SHARED = Guarantee("isolation", False, "ExampleConnector (tokens and images)")
KEPT = Guarantee("isolation", True, "blocks are found by scope")


@pytest.mark.parametrize(
    ("guarantees", "is_isolated"),
    [([SHARED], False), ([KEPT], None), ([], None)],
    ids=["shared", "kept", "not told"],
)
def test_an_answer_says_where_workspaces_are_not_kept_apart(
    tmp_path: Path, guarantees: list[Guarantee], is_isolated: bool | None
) -> None:
    scripted = ScriptedEngine(guarantees=guarantees)
    with serve(scripted) as engine, serve_gateway(tmp_path, engine) as gateway:
        chat = {"model": MODEL, "messages": MESSAGES}
        for path, request in (("/v1/messages", body()), ("/v1/chat/completions", chat)):
            reply = httpx.post(f"{gateway}{path}", json=request, headers=HEADERS, timeout=120)
            assert reply.status_code == 200, reply.text
            assert reply.json()["holdfast"].get("is_isolated") is is_isolated
