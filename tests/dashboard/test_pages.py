"""Every page in the states that its reader may meet, on a real gateway over a real ledger."""

from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.conftest import Gateways
from tests.dashboard.ledgers import NUM_MANY, fill, one_row
from tests.dashboard.signed_in import open_page, sign_in
from tests.gateway.serving import ADMIN_KEY, serve_gateway

PAGES = ("overview", "savings", "workspaces", "requests", "why")
# What is drawn as Markdown, which text from outside must never reach.
MARKDOWN = ("markdown", "caption", "info", "warning", "error", "success", "metric", "subheader")


def opened(
    monkeypatch: pytest.MonkeyPatch, gateways: Gateways, state: str, page: str, **query: str
) -> AppTest:
    sign_in(monkeypatch, gateways.url(state), ADMIN_KEY)
    app = open_page(page, query)
    assert not app.exception and not app.error, (app.exception, app.error)
    return app


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def texts(app: AppTest) -> str:
    return " ".join(str(element.value) for kind in MARKDOWN for element in app.get(kind))


def table(app: AppTest, column: str) -> Any:
    """The first table that has such a column."""
    return next(each.value for each in app.dataframe if column in each.value.columns)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("overview", "No requests in this range"),
        ("savings", "No requests in this range"),
        ("workspaces", "No requests in this range"),
        ("requests", "No requests in this range"),
        ("why", "Nothing missed in this range"),
    ],
)
def test_empty(monkeypatch: pytest.MonkeyPatch, gateways: Gateways, page: str, said: str) -> None:
    """No number is 0 that is unknown, and what stands there says how that changes."""
    app = opened(monkeypatch, gateways, "empty", page)
    assert said in texts(app)
    shown = metrics(app)
    if page == "overview":
        assert (shown["Token hit rate"], shown["Net saved"], shown["Requests"]) == ("–", "–", "0")
        assert shown["First token, cached"] == "–"


@pytest.mark.parametrize("page", PAGES)
def test_one_row(monkeypatch: pytest.MonkeyPatch, gateways: Gateways, page: str) -> None:
    app = opened(monkeypatch, gateways, "one_row", page)
    shown = metrics(app)
    match page:
        case "overview":
            # 2,000 written at 25 % above the price of a token, a millionth of a dollar.
            assert (shown["Requests"], shown["Net saved"]) == ("1", ":red[−$0.000500]")
            assert "100.0% · 1 request" in [each.value for each in app.text]
            assert shown["Leases kept"] == "–", "no engine runs, so none has ended"
        case "savings":
            assert shown["Write premium"] == "$0.000500"
        case "workspaces":
            assert table(app, "Hit rate").loc[0, "Requests"] == 1
        case _:
            assert list(table(app, "Id")["Id"]) == [f"msg_{1:028x}"]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("savings", "Nothing was charged"),
        ("fleet", "No engine held the beginning of a prompt"),
    ],
)
def test_requests_without_a_token_draw_no_empty_chart(
    monkeypatch: pytest.MonkeyPatch, gateways: Gateways, page: str, said: str
) -> None:
    app = opened(monkeypatch, gateways, "refused", page)
    assert said in texts(app)
    assert not app.get("arrow_vega_lite_chart")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("chosen", ["6h", "30d"])
def test_one_bucket(
    monkeypatch: pytest.MonkeyPatch, gateways: Gateways, page: str, chosen: str
) -> None:
    app = opened(monkeypatch, gateways, "one_bucket", page, range=chosen)
    if page == "overview":
        assert metrics(app)["Token hit rate"] == "99.7%"  # 3,000 of 3,010
    if page == "savings":
        assert table(app, "Cheaper TTL").loc[0, "Paid back"] == "yes"


@pytest.mark.parametrize("page", PAGES)
def test_negative_savings(monkeypatch: pytest.MonkeyPatch, gateways: Gateways, page: str) -> None:
    app = opened(monkeypatch, gateways, "negative", page)
    match page:
        case "overview" | "savings":
            # 54,000 tokens at twice the price: as much again.
            assert metrics(app)["Net saved"] == ":red[−$0.0540]"
        case "workspaces":
            assert metrics(app)["Worst net saved"] == ":red[−$0.0540]"
    if page == "savings":
        prefix = table(app, "Cheaper TTL")
        assert prefix.loc[0, "Paid back"] == "not yet"
        assert prefix.loc[0, "Pays back after (reads)"] == 2


@pytest.mark.parametrize("page", PAGES)
def test_many_rows(monkeypatch: pytest.MonkeyPatch, gateways: Gateways, page: str) -> None:
    """The gateway sums them: no page gets more than it draws."""
    app = opened(monkeypatch, gateways, "many", page, range="30d")
    assert all(len(each.value) <= 200 for each in app.dataframe)
    if page == "workspaces":
        in_range = table(app, "Hit rate")["Requests"].sum()
        assert NUM_MANY * 0.99 < in_range <= NUM_MANY
    if page == "requests":
        newest = list(table(app, "Id")["Id"])
        next(button for button in app.button if button.label == "Older").click().run()
        older = list(table(app, "Id")["Id"])
        assert len(newest) == len(older) == 200 and not set(newest) & set(older)


@pytest.mark.parametrize("page", PAGES)
def test_the_gateway_goes_away_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str
) -> None:
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


@pytest.mark.parametrize("page", PAGES)
def test_hostile_names_stay_in_cells_and_options(
    monkeypatch: pytest.MonkeyPatch, gateways: Gateways, page: str
) -> None:
    app = opened(
        monkeypatch, gateways, "hostile", page, request=f"msg_{1:028x}", miss=f"msg_{1:028x}"
    )
    assert "evil.test" not in texts(app)
    cells = " ".join(each.value.to_csv() for each in app.dataframe)
    assert "evil.test" in cells or page == "overview"


def test_a_linked_request_is_opened_and_an_unknown_one_is_said(
    monkeypatch: pytest.MonkeyPatch, gateways: Gateways
) -> None:
    app = opened(monkeypatch, gateways, "one_row", "requests", request=f"msg_{1:028x}")
    assert metrics(app)["Prompt tokens"] == "2,100"
    app.text_input(key="request").set_value("../../keys?x=<b>").run()
    assert not app.exception and not app.error
    assert "no such request" in app.info[0].value
