"""Counts that no turn can have stop neither the drain nor the reconciliation of others."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.protocol import Done, FinalCounts, Finished, Frame, GenerateRequest, InputUsage
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import API_KEY, eventually, serve, serve_gateway

HEADERS = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def url(engine: ScriptedEngine, tmp_path: Path) -> Iterator[str]:
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        yield url


@pytest.mark.parametrize("count", [2**63, 2**31, -1])
def test_a_count_that_is_not_sane_ends_its_turn_and_no_other(
    engine: ScriptedEngine, url: str, count: int
) -> None:
    def mad(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
        finished = Finished(reason="stop", output_tokens=count)
        return [finished, Done(request_id=request.request_id, output_tokens=count)]

    engine.script = mad
    refused = httpx.post(f"{url}/v1/messages", json=body(), headers=HEADERS, timeout=60)
    assert refused.status_code == 500
    engine.final["msg_0"] = FinalCounts(
        request_id="msg_0", epoch="epoch-1", reason="stop", output_tokens=count
    )
    engine.script = say("Hello")
    served = httpx.post(f"{url}/v1/messages", json=body(), headers=HEADERS, timeout=60)
    assert served.status_code == 200
    admin = Admin(url)

    def told() -> set[str]:
        return {turn["outcome"] for turn in admin.get("turns?limit=9")}

    eventually(lambda: told() == {"stop", "api_error"})
    assert httpx.get(f"{url}/readyz", timeout=120).status_code == 200
