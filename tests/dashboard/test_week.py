"""The week's advice on the Overview, on a real gateway over a real ledger."""

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.ui import formats
from tests.dashboard.conftest import Show
from tests.dashboard.fake_admin import ADMIN_KEY as FAKE_KEY
from tests.dashboard.fake_admin import serve_fake
from tests.dashboard.live_answers import about
from tests.dashboard.signed_in import open_page, said, sign_in
from tests.gateway.admin_client import Admin
from tests.gateway.advice.weeks import week
from tests.gateway.serving import serve_gateway

WAIT_SECONDS = 180.0


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("week")
    turns = list(week())
    with serve_gateway(data, "http://127.0.0.1:9", turns=turns) as url:
        yield url


def has_come(app: AppTest) -> AppTest:
    deadline = time.monotonic() + WAIT_SECONDS
    while app.get("skeleton"):
        assert time.monotonic() < deadline, "no advice has come"
        time.sleep(0.1)
        app.run()
    assert not app.exception and not app.error, (app.exception, app.error)
    return app


def test_the_lines_are_those_of_the_api(show: Show, gateway: str) -> None:
    app = has_come(show(gateway, "overview"))
    summary = Admin(gateway).get("advice/summary")
    assert summary["lines"]
    for line in summary["lines"]:
        tokens = f"{line['multiples']:,.0f} input tokens"
        worth = formats.dollars(line["nano"])
        worth += "" if tokens in line["text"] else f" ({tokens})"
        assert f"{worth}: {line['text']}" in [element.value for element in app.text]
    assert len(app.expander) == (len(summary["lines"]) > 3), "three stand in the open"
    assert any(element.value.startswith(summary["text"]) for element in app.caption)


def followed(show: Show, url: str, kind: str) -> tuple[Any, AppTest]:
    """A line of that kind, and the page that its link leads to, as a new tab opens it."""
    lines = Admin(url).get("advice/summary")["lines"]
    number = next(number for number, line in enumerate(lines) if line["kind"] == kind)
    app = has_come(show(url, "overview", range="1h"))
    link = urlsplit(app.get("link_button")[number].proto.url)
    return lines[number], show(url, link.path, **dict(parse_qsl(link.query)))


def test_a_line_leads_to_the_page_that_shows_it(show: Show, gateway: str) -> None:
    line, app = followed(show, gateway, "fault")
    assert app.title[0].value == "Advice"
    state = app.session_state
    assert (state["range"], state["workspace"], state["model"]) == ("7d", "nonces", "m")
    block, _, what = line["text"].partition(", ")[2].partition(", ")[2].partition(": ")
    block = block.rpartition(" ")[2]
    assert any(element.value.startswith(f"{block}: {what}") for element in app.text)
    assert any(f"{line['num_turns']} requests" in element.value for element in app.text)


def test_what_is_unpaid_is_the_loss_that_savings_shows(show: Show, gateway: str) -> None:
    line, app = followed(show, gateway, "unpaid")
    assert app.title[0].value == "Savings"
    # The outputs cost the same with and without a cache.
    loss = f"Caching cost **{formats.dollars(line['nano'])} more than it saved** in the last 7"
    assert loss in said(app)


def test_a_chosen_workspace_has_its_own_advice(show: Show, gateway: str) -> None:
    app = has_come(show(gateway, "overview", workspace="sound"))
    assert any(element.value.startswith("Nothing to advise.") for element in app.info)
    app.selectbox(key="workspace").set_value("nonces").run()
    assert "Workspace nonces" in said(has_come(app), "text")


def test_the_page_stands_where_no_advice_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's answer is of no use: the place of the advice says so, and only that."""
    with serve_fake() as fake:
        fake.answers["/admin/v1/about"] = about()
        sign_in(monkeypatch, fake.url, FAKE_KEY)
        app = open_page("overview")
        deadline = time.monotonic() + WAIT_SECONDS
        while not any("There is no advice now" in element.value for element in app.info):
            assert time.monotonic() < deadline
            app.run()
        assert not app.exception
