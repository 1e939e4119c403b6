"""What clients keep at the gateway, and name in later requests, costs others nothing."""

import base64
import os
from collections.abc import Iterator

import pytest

from gateway.http.batch_rows import BATCH_BYTES, ROW_BYTES
from gateway.limits import large_bodies
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import MODEL
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve, serve_gateway

MEBIBYTE = 1 << 20
NUM_KEPT_BYTES = 3 * MEBIBYTE


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    data, engine = tmp_path_factory.mktemp("strict"), ScriptedEngine()
    bounds = {
        # The content may come once a minute.
        "large_body_bytes_per_minute": NUM_KEPT_BYTES + MEBIBYTE // 8,
        "batch_bytes": 2 * (BATCH_BYTES + 10 * ROW_BYTES + 10),
    }
    with serve(engine) as engine_url, serve_gateway(data, engine_url, **bounds) as url:
        stack = Stack(url, engine, data)
        eventually(stack.is_ready)
        yield stack


def test_a_large_cached_content_counts_against_the_rate_of_large_bodies_at_each_use(
    strict: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 100 bytes that names it costs as much as one that sends it."""
    monkeypatch.setattr(large_bodies, "MAX_WAIT_SECONDS", 0.1)
    data = base64.b64encode(os.urandom(NUM_KEPT_BYTES * 3 // 4)).decode()
    image = {"inlineData": {"mimeType": "image/png", "data": data}}
    parts = [{"text": "Rules. " * 400}, image]
    content = {"model": f"models/{MODEL}", "contents": [{"role": "user", "parts": parts}]}
    with strict.http() as http:
        made = http.post("/v1beta/cachedContents", json=content)
        assert made.status_code == 200, made.text
        name = made.json()["name"]
        asked = {"contents": [{"parts": [{"text": "And?"}]}], "cachedContent": name}
        path = f"/v1beta/models/{MODEL}"
        for late in (
            http.post(f"{path}:generateContent", json=asked),
            http.post(f"{path}:countTokens", json={"generateContentRequest": asked}),
            http.patch(f"/v1beta/{name}", json={"ttl": "7200s"}),
        ):
            assert late.status_code == 429, late.text
            assert "bytes of bodies" in late.json()["error"]["message"]
            assert int(late.headers["retry-after"]) > 0
        small = http.post(f"{path}:generateContent", json={"contents": asked["contents"]})
        assert small.status_code == 200, "what does not name it goes on"


def test_rows_of_a_few_bytes_count_what_they_take_in_the_database(strict: Stack) -> None:
    rows = [{"custom_id": f"r{number}", "params": 0} for number in range(10)]
    with strict.http() as http:
        replies = [http.post("/v1/messages/batches", json={"requests": rows}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert "bytes of batches" in replies[-1].json()["error"]["message"]
