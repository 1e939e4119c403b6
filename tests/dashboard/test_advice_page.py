"""The page "Advice" in Streamlit's harness, on a real gateway over a real ledger."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from gateway.cli.migrate import migrate
from gateway.ledger.database import Ledger, with_ledger
from tests.dashboard.signed_in import open_page, sign_in
from tests.gateway.admin.test_advise import BODIES, RULES, record
from tests.gateway.serving import ADMIN_KEY, make_settings, serve_gateway

HEADERS = {"x-api-key": ADMIN_KEY}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data: Path = tmp_path_factory.mktemp("advice-page")
    settings = make_settings(data)
    migrate(settings)
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        post(url, "workspaces", {"id": "team-a"})
        key = post(url, "keys", {"workspace": "team-a", "name": "k"})["info"]["id"]
        start = datetime.now(UTC) - timedelta(hours=2)
        turns = [record(n, RULES) for n in range(12)]
        turns += [record(n, f"request {n}\n{RULES}", "team-b") for n in range(12)]
        for number, turn in enumerate(turns):
            turn.opened_at = start + timedelta(minutes=number % 12)
            turn.key_id = key if turn.workspace == "team-a" else "key_2"

        async def fill(ledger: Ledger) -> None:
            await ledger.insert_turns(turns)

        asyncio.run(with_ledger(settings.ledger_url, fill))
        yield url


def post(url: str, path: str, body: Any) -> Any:
    reply = httpx.post(f"{url}/admin/v1/{path}", json=body, headers=HEADERS, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def opened(monkeypatch: pytest.MonkeyPatch, url: str, **query: str) -> AppTest:
    sign_in(monkeypatch, url, ADMIN_KEY)
    app = open_page("advice", query)
    assert not app.exception and not app.error, (app.exception, app.error)
    return app


def table(app: AppTest, column: str) -> Any:
    return next(each.value for each in app.dataframe if column in each.value.columns)


def said(app: AppTest) -> str:
    kinds = ("text", "info", "markdown")
    return " ".join(str(each.value) for kind in kinds for each in app.get(kind))


def test_the_figures_are_those_of_the_api(monkeypatch: pytest.MonkeyPatch, gateway: str) -> None:
    app = opened(monkeypatch, gateway)
    now = int(datetime.now(UTC).timestamp() * 1000)
    told = post(gateway, "advise", {"since_ms": now - 86_400_000, "until_ms": now + 1000})
    told["streams"].sort(key=lambda each: -each["saves"]["multiples"])
    shown = table(app, "Advice")
    assert list(shown["Workspace"]) == [each["workspace"] for each in told["streams"]]
    saves = [round(each["saves"]["multiples"]) for each in told["streams"]]
    assert list(shown["Would save (input tokens)"]) == saves
    first = told["streams"][0]
    assert first["text"] in said(app)
    ways = table(app, "Cost (input tokens)")
    assert list(ways["Read"]) == [each["cache_read_tokens"] for each in first["outcomes"]]


def test_a_fault_is_shown_with_its_block_and_its_requests(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    app = opened(monkeypatch, gateway, workspace="team-b")
    found = table(app, "Block")
    assert list(found["Block"]) == ["system.0"]
    assert "new in every request" in found.loc[0, "What"]
    assert "msg_team-b_" in found.loc[0, "From"]


def test_the_advised_policy_is_set_for_the_key(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    app = opened(monkeypatch, gateway, workspace="team-a")
    app.button(key="advice_apply").click().run()
    assert not app.exception and not app.error
    keys = httpx.get(f"{gateway}/admin/v1/keys", headers=HEADERS, timeout=60).json()
    policies = {key["name"]: (key["auto_cache"], key["auto_cache_ttl"]) for key in keys}
    assert policies.pop("k") == ("prefix", "5m")
    assert set(policies.values()) == {(None, None)}


def test_a_range_without_requests_says_so(monkeypatch: pytest.MonkeyPatch, gateway: str) -> None:
    app = opened(monkeypatch, gateway, range="1h")
    assert "No requests in this range" in said(app) and not app.dataframe


def pasted(app: AppTest, *texts: str) -> AppTest:
    app.segmented_control(key="advice_mode").set_value("Pasted requests").run()
    for number, text in enumerate(texts):
        app.text_area(key=f"advice_pasted_{number}").set_value(text)
    app.run()
    return app.button(key="advise").click().run()


def test_a_pasted_request_is_shown_with_its_markers(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    app = pasted(opened(monkeypatch, gateway), json.dumps(BODIES["messages"]))
    assert "Nothing is marked" in table(app, "Block").loc[0, "What"]
    marked = msgspec.json.decode(app.code[0].value)
    assert marked["system"][0]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}


def test_two_pasted_requests_are_compared(monkeypatch: pytest.MonkeyPatch, gateway: str) -> None:
    bodies = [{**BODIES["messages"], "system": f"id {n}\n{RULES}"} for n in (1, 2)]
    app = pasted(opened(monkeypatch, gateway), *map(json.dumps, bodies))
    assert any(subheader.value == "Compared with each other" for subheader in app.subheader)


def test_what_is_no_request_is_said(monkeypatch: pytest.MonkeyPatch, gateway: str) -> None:
    app = pasted(opened(monkeypatch, gateway), "no json ![x](http://evil.test)")
    assert not app.exception and app.error
    assert "neither a JSON object" in said(app)
