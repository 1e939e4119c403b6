"""The pages "Advice" and "Plan" in Streamlit's harness, on a real gateway over a real ledger."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.conftest import Show
from tests.dashboard.signed_in import said, table
from tests.dashboard.test_figures import card
from tests.gateway.admin.test_advise import BODIES, RULES, record
from tests.gateway.admin_client import Admin
from tests.gateway.prompt.test_media import png
from tests.gateway.serving import fill, make_settings, serve_gateway

Page = Callable[..., AppTest]
LINE = '{"timestamp": %d, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("advice-page")
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        admin = Admin(url)
        admin.workspace("team-a")
        key, _ = admin.make_key("team-a", name="k")
        start = datetime.now(UTC) - timedelta(hours=2)
        turns = [record(n, RULES) for n in range(12)]
        turns += [record(n, f"request {n}\n{RULES}", "team-b") for n in range(12)]
        turns.append(record(0, RULES, "team-c"))
        turns.append(record(1, RULES, "team-c"))
        turns[-1].approximate = "compressed kvzip 0.5: 496 of 967"
        for number, turn in enumerate(turns):
            turn.opened_at = start + timedelta(minutes=number % 12)
            turn.key_id = key if turn.workspace == "team-a" else "key_2"
        fill(make_settings(data), turns)
        yield url


@pytest.fixture
def page(show: Show, gateway: str) -> Page:
    return partial(show, gateway, "advice")


@pytest.fixture
def plan(show: Show, gateway: str) -> Page:
    return partial(show, gateway, "plan")


def test_the_figures_are_those_of_the_api(page: Page, gateway: str) -> None:
    app = page()
    now = int(datetime.now(UTC).timestamp() * 1000)
    report = Admin(gateway).post("advise", {"since_ms": now - 86_400_000, "until_ms": now + 1000})
    report["streams"].sort(key=lambda stream: -stream["saves"]["multiples"])
    frame = table(app, "Advice").set_index("Workspace", drop=False)
    assert frame.loc["team-a", "Key"] == "k", "keys stand by their names"
    assert list(frame["Workspace"]) == [stream["workspace"] for stream in report["streams"]]
    saves = [round(stream["saves"]["multiples"]) for stream in report["streams"]]
    assert list(frame["Would save (input tokens)"]) == saves
    first = report["streams"][0]
    assert first["text"] in said(app)
    assert first["saves"]["prefill_seconds"] is None, "no engine has told of its steps"
    unknown = ("–", "a token's time is not known yet")
    assert card(app, "Prefill saved") == unknown
    ways = table(app, "Cost (input tokens)")
    assert list(ways["Read"]) == [outcome["cache_read_tokens"] for outcome in first["outcomes"]]


def test_a_fault_is_shown_with_its_block_and_its_requests(page: Page) -> None:
    app = page(workspace="team-b")
    (finding,) = [
        element.value for element in app.text if element.value.startswith("system.0: A part")
    ]
    assert "new in every request" in finding, "once, and in full"
    assert any("msg_team-b_" in link.proto.label for link in app.get("page_link"))


def test_near_duplicate_prefixes_are_shown_with_what_one_name_saves(page: Page) -> None:
    app = page(workspace="team-b")
    (line,) = [element.value for element in app.text if "12 prefixes of about" in element.value]
    assert line.startswith("system.0: Workspace team-b") and "differ in an id" in line
    assert not any(
        "prefixes of about" in element.value for element in page(workspace="team-a").text
    )


def test_an_approximate_turn_stands_out(show: Show, gateway: str) -> None:
    app = show(gateway, "requests", workspace="team-c")
    cell = "compressed kvzip 0.5: 496 of 967"
    assert sorted(table(app, "Approximate")["Approximate"]) == ["", cell]
    styles = [
        element.proto.arrow_data.styler.styles or element.proto.styler.styles
        for element in app.dataframe
    ]
    assert sum("background-color" in style for style in styles) == 1
    request_page = show(gateway, "requests", workspace="team-c", request="msg_team-c_01")
    assert any(cell in element.value for element in request_page.markdown)
    plain = show(gateway, "requests", workspace="team-a")
    assert "Approximate" not in table(plain, "Id")


def test_the_advised_policy_is_set_for_the_key(page: Page, gateway: str) -> None:
    app = page(workspace="team-a")
    app.button(key="advice_apply").click().run()
    assert not app.exception and not app.error
    keys = Admin(gateway).get("keys")
    policies = {key["name"]: (key["auto_cache"], key["auto_cache_ttl"]) for key in keys}
    assert policies.pop("k") == ("prefix", "5m")
    assert set(policies.values()) == {(None, None)}


def pasted(app: AppTest, *texts: str) -> AppTest:
    app.segmented_control(key="advice_mode").set_value("Pasted requests").run()
    for number, text in enumerate(texts):
        app.text_area(key=f"advice_pasted_{number}").set_value(text)
    app.run()
    return app.button(key="advise").click().run()


def test_a_pasted_request_is_shown_with_its_markers(page: Page) -> None:
    app = pasted(page(), json.dumps(BODIES["messages"]))
    assert "Nothing is marked" in said(app)
    marked = msgspec.json.decode(app.code[0].value)
    assert marked["system"][0]["cache_control"] == {"type": "ephemeral", "ttl": "5m"}


PNG = b64encode(png(64, 48)).decode()
URL = f"data:image/png;base64,{PNG}"
WITH_IMAGES = {
    "messages": {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": PNG},
                    },
                    {"type": "text", "text": "What is this?"},
                ],
            }
        ],
    },
    "chat": {
        "model": "m",
        "max_completion_tokens": 9,
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}
        ],
    },
    "responses": {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}],
    },
    "gemini": {
        "contents": [
            {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PNG}}]}
        ]
    },
}


@pytest.mark.parametrize("dialect", WITH_IMAGES)
def test_a_pasted_image_that_no_model_here_sees_is_said(page: Page, dialect: str) -> None:
    app = pasted(page(), json.dumps(WITH_IMAGES[dialect]))
    assert "1 image in this request: this model will not see it" in said(app, "warning")
    app = pasted(app, json.dumps(BODIES["messages"]))
    assert "will not see" not in said(app, "warning")


def go(app: AppTest) -> AppTest:
    app = app.button(key="plan_go").click().run(timeout=120)
    assert not app.exception, app.exception
    return app


def test_a_plans_figures_are_those_of_the_api(plan: Page, gateway: str) -> None:
    app = plan()
    app.segmented_control(key="plan_source").set_value("A trace").run()
    trace = "\n".join(LINE % (n * 60_000) for n in range(5))
    app.text_area(key="plan_trace").set_value(trace)
    app.number_input(key="plan_device_tokens").set_value(163_840)
    app = go(app)
    assert not app.error, said(app)
    now = int(datetime.now(UTC).timestamp() * 1000)
    span = {"since_ms": now - 86_400_000, "until_ms": now + 1000}
    answer = Admin(gateway).post("plan", {"trace": trace, "device_tokens": 163_840, **span})
    frame = table(app, "Fleet")
    assert list(frame["Fleet"]) == [option["label"] for option in answer["memory"]]
    assert list(frame["Hit rate"]) == [option["hit_rate"] for option in answer["memory"]]
    assert answer["knee_text"] in said(app) and answer["changes"][0]["text"] in said(app)
    assert "80.0% of the prompt tokens would be read" in said(app)


def test_an_engine_whose_memory_is_not_known_is_asked_for(plan: Page) -> None:
    app = plan(workspace="team-a")
    app = app.button(key="plan_go").click().run(timeout=120)
    assert "its memory is not known" in said(app)
    app.number_input(key="plan_device_tokens").set_value(163_840)
    app = go(app)
    assert "of the prompt tokens would be read" in said(app)
