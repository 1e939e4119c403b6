"""The Overview page, run by Streamlit's own test harness against a real HTTP server."""

from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

APP = Path(__file__).parents[2] / "dashboard" / "app.py"
ADMIN_KEY = "admin-key-of-the-tests"
HOSTILE = "![x](http://evil.test/x.png) :red[boo] <img src=x> $a$"


@pytest.fixture
def app(admin: Any, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    monkeypatch.setenv("DASHBOARD_GATEWAY_URL", admin.url)
    monkeypatch.setenv("DASHBOARD_ADMIN_KEY", ADMIN_KEY)
    return AppTest.from_file(APP, default_timeout=30)


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def test_the_page_shows_what_the_api_said(app: AppTest, admin: Any) -> None:
    app.run()
    assert not app.exception
    shown = metrics(app)
    assert shown["Token hit rate"] == "64.5%"  # 6,000 of 9,300
    assert shown["Net saved"] == "$0.000005"
    assert shown["Requests"] == "3"
    assert shown["Read from cache"] == "6.00K"
    table = app.dataframe[0].value
    assert table.loc[0, "Leased"] == 25
    assert table.loc[0, "Up"] == "1m 15s"
    assert "1 of 1 engines ready" in app.caption[0].value


def test_a_loss_is_shown_as_one(app: AppTest, admin: Any) -> None:
    admin.answers["/admin/v1/overview"]["saved_nano"] = -2_500_000
    app.run()
    assert metrics(app)["Net saved"] == ":red[−$0.002500]"


def test_a_model_without_a_price_has_no_saving_rather_than_zero(app: AppTest, admin: Any) -> None:
    admin.answers["/admin/v1/overview"]["totals"]["unpriced"] = 3
    app.run()
    assert metrics(app)["Net saved"] == "–"


def test_no_traffic_yet_is_a_state_of_its_own(app: AppTest, admin: Any) -> None:
    admin.answers["/admin/v1/overview"] = {
        "bucket_seconds": 60,
        "totals": {},
        "rates": {"token_hit_rate": None},
        "saved_nano": 0,
        "series": [],
    }
    app.run()
    assert not app.exception
    assert metrics(app)["Token hit rate"] == "–"
    assert "No requests in this range" in app.info[0].value


def test_an_unreachable_gateway_is_said_and_tried_again(app: AppTest, admin: Any) -> None:
    admin.status = 503
    app.run()
    assert not app.exception
    assert "answers 503" in app.error[0].value
    admin.status = 200
    app.run()
    assert not app.error
    assert metrics(app)["Requests"] == "3"


def test_the_last_numbers_stay_while_the_gateway_is_away(app: AppTest, admin: Any) -> None:
    app.run()
    admin.status = 503
    app.run()
    assert "Showing what was known at" in app.warning[0].value
    assert metrics(app)["Requests"] == "3"


def test_a_wrong_admin_key_is_named(
    app: AppTest, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASHBOARD_ADMIN_KEY", "another")
    app.run()
    assert "refuses the admin key" in app.error[0].value


def test_a_missing_setting_is_named(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASHBOARD_ADMIN_KEY")
    app.run()
    assert not app.exception
    assert app.text[0].value.startswith("DASHBOARD_ADMIN_KEY: ")


def test_an_engine_that_is_down_has_a_row_and_no_bar(app: AppTest, admin: Any) -> None:
    admin.answers["/admin/v1/engines"] = [
        {"name": "a", "url": "http://127.0.0.1:8100", "status": "down"},
    ]
    app.run()
    assert not app.exception
    assert "0 of 1 engines ready" in app.caption[0].value
    assert app.dataframe[0].value.loc[0, "State"] == "down"
    assert "No engine reports its memory" in app.info[0].value


def test_hostile_text_stays_in_table_cells(app: AppTest, admin: Any) -> None:
    admin.answers["/admin/v1/engines"][0]["description"]["model"] = HOSTILE
    admin.answers["/admin/v1/engines"][0]["url"] = HOSTILE
    app.run()
    assert not app.exception
    assert app.dataframe[0].value.loc[0, "Model"] == HOSTILE
    for element in (*app.markdown, *app.caption, *app.info, *app.metric, *app.error):
        assert "evil.test" not in str(element.value)


def test_the_range_is_asked_for(app: AppTest, admin: Any) -> None:
    app.run()
    app.segmented_control[0].set_value("6 hours").run()
    assert any("=21600" in path for path in admin.asked)
