"""Every page in the states that its reader may meet, on a real gateway over a real ledger."""

from pathlib import Path

import pytest

from tests.dashboard.conftest import Gateways, Show
from tests.dashboard.ledgers import NUM_MANY, fill, one_row
from tests.dashboard.signed_in import metrics, open_page, press, said, sign_in, table
from tests.gateway.serving import ADMIN_KEY, serve_gateway

PAGES = ("overview", "savings", "workspaces", "requests", "why")
FIRST = f"msg_{1:028x}"


@pytest.mark.parametrize("page", PAGES)
def test_empty(show: Show, gateways: Gateways, page: str) -> None:
    """No number is 0 that is unknown, and what stands there says how that changes."""
    app = show(gateways.url("empty"), page)
    assert "No requests in this range" in said(app)
    values = metrics(app)
    if page == "overview":
        assert (values["Token hit rate"], values["Net saved"], values["Requests"]) == (
            "–",
            "–",
            "0",
        )
        assert values["First token, with a read"] == "–"


@pytest.mark.parametrize("page", PAGES)
def test_one_row(show: Show, gateways: Gateways, page: str) -> None:
    app = show(gateways.url("one_row"), page)
    values = metrics(app)
    match page:
        case "overview":
            # 2,000 written at 25 % above the price of a token, a millionth of a dollar.
            assert (values["Requests"], values["Net saved"]) == ("1", ":red[−$0.000500]")
            assert "100.0% · 1 request" in [element.value for element in app.text]
            assert values["Leases kept"] == "–", "no engine runs, so none has ended"
        case "savings":
            assert values["Write premium"] == "$0.000500"
        case "workspaces":
            assert table(app, "Hit rate").loc[0, "Requests"] == 1
        case _:
            assert list(table(app, "Id")["Id"]) == [FIRST]


def test_requests_without_a_token_draw_no_empty_chart(show: Show, gateways: Gateways) -> None:
    for page, nothing in (
        ("savings", "Nothing was charged"),
        ("fleet", "No engine held the beginning of a prompt"),
    ):
        app = show(gateways.url("refused"), page)
        assert nothing in said(app) and not app.get("arrow_vega_lite_chart")


@pytest.mark.parametrize("page", PAGES)
def test_many_rows(show: Show, gateways: Gateways, page: str) -> None:
    """The gateway sums them: no page gets more than it draws."""
    app = show(gateways.url("many"), page, range="30d")
    assert all(len(element.value) <= 200 for element in app.dataframe)
    if page == "workspaces":
        in_range = table(app, "Hit rate")["Requests"].sum()
        assert NUM_MANY * 0.99 < in_range <= NUM_MANY
    if page == "requests":
        newest = list(table(app, "Id")["Id"])
        older = list(table(press(app, "Older"), "Id")["Id"])
        assert len(newest) == len(older) == 200 and not set(newest) & set(older)


@pytest.mark.parametrize("page", ["overview", "requests"])
def test_the_gateway_goes_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str) -> None:
    """The last numbers stay, with the time they are from; a page that has none says so."""
    fill(tmp_path / "data", one_row())
    with serve_gateway(tmp_path / "data", "http://127.0.0.1:9") as url:
        sign_in(monkeypatch, url, ADMIN_KEY)
        app = open_page(page)
        before = metrics(app)
    app.run()
    assert not app.exception
    assert "Showing what was known at" in app.warning[0].value
    assert metrics(app) == before
    app.segmented_control(key="range").set_value("7d").run()
    assert not app.exception
    assert "The gateway does not answer" in app.error[0].value
    assert not app.metric and not app.dataframe


def test_a_linked_request_opens_and_an_unknown_one_is_said(show: Show, gateways: Gateways) -> None:
    app = show(gateways.url("one_row"), "requests", request=FIRST)
    assert metrics(app)["Prompt tokens"] == "2,100"
    app.text_input(key="request").set_value("../../keys?x=<b>").run()
    assert not app.exception and not app.error
    assert "no such request" in app.info[0].value
