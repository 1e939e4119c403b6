"""The week's advice on the Overview, on a real gateway over a real ledger."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from gateway.cli.migrate import migrate
from gateway.ledger.database import Ledger, with_ledger
from tests.dashboard.conftest import Gateways
from tests.dashboard.fake_admin import ADMIN_KEY as FAKE_KEY
from tests.dashboard.fake_admin import serve_fake
from tests.dashboard.live_answers import about
from tests.dashboard.signed_in import open_page, sign_in
from tests.gateway.admin_client import Admin
from tests.gateway.advice.weeks import week
from tests.gateway.serving import ADMIN_KEY, make_settings, serve_gateway

WAIT_SECONDS = 180.0


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data: Path = tmp_path_factory.mktemp("week")
    settings = make_settings(data)
    migrate(settings)
    turns = list(week(datetime.now(UTC) - timedelta(days=2)))

    async def fill(ledger: Ledger) -> None:
        await ledger.insert_turns(turns)

    asyncio.run(with_ledger(settings.ledger_url, fill))
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        yield url


def opened(monkeypatch: pytest.MonkeyPatch, url: str, **query: str) -> AppTest:
    """The Overview, once the week's advice has come."""
    sign_in(monkeypatch, url, ADMIN_KEY)
    app = open_page("overview", query)
    return has_come(app)


def has_come(app: AppTest) -> AppTest:
    deadline = time.monotonic() + WAIT_SECONDS
    while app.get("skeleton"):
        assert time.monotonic() < deadline, "no advice has come"
        time.sleep(0.1)
        app.run()
    assert not app.exception and not app.error, (app.exception, app.error)
    return app


def told(app: AppTest) -> list[str]:
    return [each.value for each in app.text]


def test_the_lines_are_those_of_the_api(monkeypatch: pytest.MonkeyPatch, gateway: str) -> None:
    app = opened(monkeypatch, gateway)
    found = Admin(gateway).get("advice/summary")
    assert found["lines"]
    for line in found["lines"]:
        assert f"{line['text']} Worth {formats.dollars(line['nano'])}." in told(app)
    assert any(each.value.startswith(found["text"]) for each in app.caption)


def followed(monkeypatch: pytest.MonkeyPatch, url: str, app: AppTest, number: int) -> AppTest:
    """The page that the link of a line leads to, as a new tab opens it."""
    link = urlsplit(app.get("link_button")[number].proto.url)
    sign_in(monkeypatch, url, ADMIN_KEY)
    page = open_page(link.path, dict(parse_qsl(link.query)))
    assert not page.exception and not page.error
    return page


def number_of(lines: list[Any], kind: str) -> int:
    return next(number for number, line in enumerate(lines) if line["kind"] == kind)


def test_a_line_leads_to_the_page_that_shows_it(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    lines = Admin(gateway).get("advice/summary")["lines"]
    number = number_of(lines, "fault")
    app = followed(monkeypatch, gateway, opened(monkeypatch, gateway, range="1h"), number)
    assert app.title[0].value == "Advice"
    state = app.session_state
    assert (state["range"], state["workspace"], state["model"]) == ("7d", "nonces", "m")
    faults = next(each.value for each in app.dataframe if "Block" in each.value.columns)
    assert lines[number]["text"].endswith(faults.loc[0, "What"])
    assert faults.loc[0, "Requests"] == lines[number]["num_turns"]


def test_what_is_unpaid_is_the_loss_that_savings_shows(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    lines = Admin(gateway).get("advice/summary")["lines"]
    number = number_of(lines, "unpaid")
    app = followed(monkeypatch, gateway, opened(monkeypatch, gateway, range="1h"), number)
    assert app.title[0].value == "Savings"
    # The outputs cost the same with and without a cache.
    shown = formats.dollars(lines[number]["nano"])
    loss = f"Caching cost **{shown} more than it saved** in the last 7"
    assert any(loss in each.value for each in app.markdown), [m.value for m in app.markdown]


def test_a_chosen_workspace_has_its_own_advice(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    app = opened(monkeypatch, gateway, workspace="sound")
    assert any(each.value.startswith("Nothing to advise.") for each in app.info)
    app.selectbox(key="workspace").set_value("nonces").run()
    has_come(app)
    assert any("Workspace nonces" in each for each in told(app))


def test_a_week_without_requests_says_so(
    monkeypatch: pytest.MonkeyPatch, gateways: Gateways
) -> None:
    app = opened(monkeypatch, gateways.url("empty"))
    assert any("there is nothing to advise on" in each.value for each in app.info)


def test_hostile_names_stay_text(monkeypatch: pytest.MonkeyPatch, gateways: Gateways) -> None:
    app = opened(monkeypatch, gateways.url("hostile"))
    kinds = ("caption", "info", "markdown")
    assert "evil.test" not in " ".join(str(e.value) for kind in kinds for e in app.get(kind))


def test_the_page_stands_where_no_advice_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's answer is of no use: the place of the advice says so, and only that."""
    with serve_fake() as fake:
        fake.answers["/admin/v1/about"] = about()
        sign_in(monkeypatch, fake.url, FAKE_KEY)
        app = open_page("overview")
        deadline = time.monotonic() + WAIT_SECONDS
        while not any("There is no advice now" in each.value for each in app.info):
            assert time.monotonic() < deadline
            app.run()
        assert not app.exception
