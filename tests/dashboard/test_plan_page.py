"""The page "Plan" in Streamlit's harness, on a real gateway over a real ledger."""

import json

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.signed_in import open_page, sign_in
from tests.dashboard.test_advice_page import gateway, post, said, table
from tests.gateway.serving import ADMIN_KEY

__all__ = ["gateway"]
LINE = '{"timestamp": %d, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}'


def opened(monkeypatch: pytest.MonkeyPatch, url: str, **query: str) -> AppTest:
    sign_in(monkeypatch, url, ADMIN_KEY)
    app = open_page("plan", query)
    assert not app.exception and not app.error, (app.exception, app.error)
    return app


def go(app: AppTest) -> AppTest:
    app = app.button(key="plan_go").click().run(timeout=120)
    assert not app.exception, app.exception
    return app


def test_the_figures_are_those_of_the_api(monkeypatch: pytest.MonkeyPatch, gateway: str) -> None:
    app = opened(monkeypatch, gateway)
    app.segmented_control(key="plan_source").set_value("A trace").run()
    trace = "\n".join(LINE % (n * 60_000) for n in range(5))
    app.text_area(key="plan_trace").set_value(trace)
    app.number_input(key="plan_device").set_value(24.0)
    app = go(app)
    assert not app.error, said(app)
    told = post(gateway, "plan", {"trace": trace, "device_gib": 24})
    shown = table(app, "Fleet")
    assert list(shown["Fleet"]) == [each["label"] for each in told["memory"]]
    assert list(shown["Hit rate"]) == [each["hit_rate"] for each in told["memory"]]
    assert told["knee_text"] in said(app) and told["buys"][0]["text"] in said(app)
    assert "80.0% of the prompt tokens would be read" in said(app)


def test_the_requests_of_the_range_are_planned(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    app = go(opened(monkeypatch, gateway, workspace="team-a"))
    assert "Simulated: 12 requests" in " ".join(each.value for each in app.caption)


def test_nothing_is_planned_before_somebody_asks(
    monkeypatch: pytest.MonkeyPatch, gateway: str
) -> None:
    app = opened(monkeypatch, gateway)
    assert "then Plan" in said(app) and not app.dataframe


@pytest.mark.parametrize(
    "config, named",
    [
        ("no json", "config: no JSON"),
        ("[]", "config: paste the whole"),
        (json.dumps({"num_hidden_layers": 2}), "config: num_attention_heads"),
    ],
)
def test_a_config_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, gateway: str, config: str, named: str
) -> None:
    app = opened(monkeypatch, gateway)
    app.segmented_control(key="plan_source").set_value("Made-up conversations").run()
    app.selectbox(key="plan_model").set_value("Another: its config.json")
    app.text_area(key="plan_config").set_value(config)
    app = go(app)
    assert app.error and named in said(app), said(app)


def test_a_range_without_requests_says_so(monkeypatch: pytest.MonkeyPatch, gateway: str) -> None:
    app = go(opened(monkeypatch, gateway, range="1h"))
    assert app.error and "no request of this range" in said(app)
