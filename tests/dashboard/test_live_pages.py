"""The pages that show engines, in Streamlit's harness, in every state that data can be in."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.conftest import Show
from tests.dashboard.fake_admin import ADMIN_KEY, FakeAdmin, serve_fake
from tests.dashboard.live_answers import about, answers, engine_now
from tests.dashboard.signed_in import metrics, said, table

PAGES = ("prefixes", "memory", "latency", "fleet", "playground")
HOSTILE = "![x](http://evil.test/x.png) :red[boo] <img src=x> $a$"
Page = Callable[[str, dict[str, Any]], AppTest]


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with serve_fake() as fake:
        yield fake


@pytest.fixture
def page(admin: FakeAdmin, show: Show) -> Page:
    """The named page, on which nothing went wrong, of a gateway that answers so."""

    def open_in(name: str, replies: dict[str, Any]) -> AppTest:
        admin.answers = replies
        return show(admin.url, name, ADMIN_KEY)

    return open_in


def mine(**changes: Any) -> dict[str, Any]:
    """One row of everything, as the key of a workspace sees it."""
    return answers("one row") | {"/admin/v1/about": about(**{"workspace": "mine", **changes})}


@pytest.mark.parametrize("state", ["empty", "100k rows"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_stands_in_every_state(page: Page, name: str, state: str) -> None:
    """Those between are below: one row of each page, and one bucket."""
    app = page(name, answers(state))
    if state == "empty":
        assert app.info, "an empty page says that it is, and why"
    assert app.title[0].value


@pytest.mark.parametrize("name", PAGES)
def test_a_gateway_that_is_away_is_said(page: Page, admin: FakeAdmin, name: str) -> None:
    app = page(name, answers("one row"))
    admin.status = 503
    app.run()
    assert not app.exception
    assert any("503" in element.value for element in (*app.error, *app.warning))
    admin.status = 200
    app.run()
    assert not app.error and not app.warning


def test_memory_shows_shares_and_waste(page: Page) -> None:
    app = page("memory", answers("one bucket"))
    assert any("a recurrent state of 3 blocks" in caption.value for caption in app.caption)
    values = metrics(app)
    assert [m.delta for m in app.metric if m.label == "Pool in use"] == [""], "nobody else uses it"
    assert values["Pool in use"] == "50.0%" and values["Copied blocks"] == "3"
    assert values["Unused tokens"] == "12.5%"  # 64 tokens in 32 blocks of 16


def test_memory_and_fleet_show_the_share_of_other_clients(page: Page) -> None:
    replies = answers("one bucket")
    shared = replies["/admin/v1/engines/memory"][0]["stats"]
    shared["foreign_running"] = 3
    shared["blocks"] |= {"foreign": 8, "active": 16, "free": 0}
    replies["/admin/v1/engines"][0]["stats"] = shared
    memory = page("memory", replies)
    assert [m.delta for m in memory.metric if m.label == "Pool in use"] == [
        "12.5% by other clients"
    ]
    pool = memory.dataframe[-1].value
    assert pool[pool["Blocks are"] == "of them foreign"][["Blocks", "Share"]].values.tolist() == [
        [8, 0.125]
    ]
    fleet = page("fleet", replies).dataframe[0].value
    assert fleet[["Foreign", "Foreign running"]].values.tolist() == [[0.125, 3]]


def test_memory_shows_the_store_on_disk(page: Page) -> None:
    replies = answers("one bucket")
    stats = replies["/admin/v1/engines/memory"][0]["stats"]
    stats["store"] = {
        "is_up": True,
        "max_bytes": 2**31,
        "used_bytes": 2**21,
        "entries": 5,
        "leases": 4,
        "misses": {"short": 2, "checksum": 1},
    }
    row = table(page("memory", replies), "Of MiB").iloc[0]
    assert (row["State"], row["MiB"], row["Of MiB"]) == ("on", 2.0, 2048.0)
    assert (row["Entries"], row["Leases"], row["Damaged"]) == (5, 4, 3)
    assert row["Damages"] == "1 checksum, 2 short"
    stats["store"] = {"is_up": False, "refused": "newer"}
    row = table(page("memory", replies), "Of MiB").iloc[0]
    assert row["State"] == "off: it is of a newer version"


def test_an_engine_without_a_map_says_so(page: Page) -> None:
    replies = answers("one bucket")
    replies["/admin/v1/engines/memory"][0]["memory"] |= {"cells": [], "unused_tokens": None}
    app = page("memory", replies)
    assert "No map" in app.info[0].value
    assert metrics(app)["Unused tokens"] == "–"


@pytest.mark.parametrize("is_up", [True, False])
def test_fleet_ticks_no_restart_only_where_every_engine_answers(page: Page, is_up: bool) -> None:
    replies = answers("one row")
    replies["/admin/v1/engines/history"] |= {"restarts": []}
    replies["/admin/v1/engines"] = [engine_now(True), engine_now(is_up, "engine-1")]
    app = page("fleet", replies)
    beginning = "No engine was restarted" if is_up else "No restart is known"
    (restarts,) = [info for info in app.info if info.value.startswith(beginning)]
    assert (restarts.icon == ":material/check_circle:") == is_up


def test_fleet_shows_what_each_engine_promises_and_why_not(page: Page) -> None:
    replies = answers("one bucket")
    [engine] = replies["/admin/v1/engines"]
    guarantees = [
        {"name": "exact_read", "is_kept": False, "note": "not told: start it with --tell"},
        {"name": "hold", "is_kept": False, "note": "no_hold: the server evicts when it wants"},
    ]
    before = engine["description"] | {
        "backend": "upstream",
        "upstream": "vllm",
        "guarantees": guarantees,
    }
    replies["/admin/v1/engines"] = [
        engine,
        engine | {"name": "engine-1"},
        engine | {"name": "engine-2", "description": before},
        engine_now(is_up=False, name="engine-3"),
    ]
    app = page("fleet", replies)
    table = next(f.value for f in app.dataframe if "Promise" in f.value)
    assert list(table.columns) == ["Promise", "native", "vllm, as it is"]
    rows = table.set_index("Promise")
    row = rows.loc["A read is what memory reused"]
    assert list(row) == ["yes: from its blocks", "no: not told: start it with --tell"]
    assert len(rows) == 6, "a row for each promise, whoever makes it"
    guarantee = {"name": "exact_read", "is_kept": False, "note": "an older engine"}
    older = engine["description"] | {"guarantees": [guarantee]}
    replies["/admin/v1/engines"] = [engine, engine | {"name": "engine-4", "description": older}]
    table = next(f.value for f in page("fleet", replies).dataframe if "Promise" in f.value)
    row = table.set_index("Promise").loc["A read is what memory reused"]
    assert list(row) == ["engine-0: yes: from its blocks; engine-4: no: an older engine"]


def test_fleet_shows_each_adapter_with_the_engines_that_have_it(page: Page) -> None:
    """By its weights: one that was trained anew stands twice until all engines have it."""
    replies = answers("one bucket")
    [engine] = replies["/admin/v1/engines"]
    blue = {"name": "blue", "digest": "b" * 64, "rank": 4, "num_bytes": 2**20}
    judge = {**blue, "name": "judge", "invocation": "<judge>", "is_leaving": True}
    with_both = engine["description"] | {"adapters": [blue, judge]}
    with_newer = engine["description"] | {"adapters": [blue | {"digest": "c" * 64}]}
    replies["/admin/v1/engines"] = [
        engine | {"description": with_both},
        engine | {"name": "engine-1", "description": with_both},
        engine | {"name": "engine-2", "description": with_newer},
    ]
    assert table(page("fleet", replies), "Acts from").values.tolist() == [
        ["m:blue", "loaded", "the start", 4, 1.0, "b" * 12, "engine-0, engine-1"],
        ["m:blue", "loaded", "the start", 4, 1.0, "c" * 12, "engine-2"],
        ["m:judge", "leaving", "'<judge>'", 4, 1.0, "b" * 12, "engine-0, engine-1"],
    ]
    replies["/admin/v1/engines"] = [engine]
    assert not any("Acts from" in element.value for element in page("fleet", replies).dataframe)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample": True}, "sample data"),
        ({"may_send": False}, "can't send"),
        ({"may_send": False, "workspace": None}, "Pick the workspace"),
    ],
)
def test_the_playground_says_why_it_is_off(page: Page, changes: dict[str, Any], words: str) -> None:
    app = page("playground", mine(**changes))
    assert words in app.info[0].value and not app.text_area


def texts(app: AppTest) -> list[str]:
    return [area.value for area in app.text_area]


def test_blocks_are_added_moved_and_taken_out(page: Page) -> None:
    app = page("playground", mine())
    handbook, rules, question = texts(app)
    app.button(key="add_tool").click().run()
    assert len(texts(app)) == 4 and "log_ship" in texts(app)[-1]
    app.button(key="move_down_1").click().run()
    assert texts(app)[:2] == [rules, handbook]
    app.button(key="drop_1").click().run()
    assert handbook not in texts(app) and question in texts(app)
    code = " ".join(element.value for element in app.code)
    assert '"tools"' in code and "log_ship" in code and "HOLDFAST_API_KEY" in code


def test_what_is_no_request_is_said_and_not_sent(page: Page, admin: FakeAdmin) -> None:
    app = page("playground", mine())
    app.segmented_control(key="playground_mode").set_value("JSON or curl").run()
    admin.refused.add("/admin/v1/advise")
    app.text_area(key="playground_pasted").set_value("curl -d @file.json http://x").run()
    assert app.error and app.button(key="send").disabled


@pytest.mark.parametrize(("sees", "warned"), [(False, True), (True, False)])
def test_an_image_that_the_chosen_model_will_not_see_is_said(
    page: Page, sees: bool, warned: bool
) -> None:
    request = {
        "dialect": "messages",
        "tokens": 9,
        "blocks": [],
        "findings": [],
        "marked": None,
        "body": {"messages": []},
        "as_messages": None,
        "num_images": 2,
    }
    report = {
        "text": "",
        "num_turns": 0,
        "num_without_sketch": 0,
        "is_cut": False,
        "since_ms": None,
        "until_ms": None,
        "streams": [],
        "requests": [request],
        "saves": {"tokens": 0, "multiples": 0.0},
    }
    listed = [
        {"id": "m", "root": None, "parent": None, "sees": sees},
        {"id": "other", "root": None, "parent": None, "sees": not sees},
    ]
    app = page("playground", mine(listed=listed) | {"/admin/v1/advise": report})
    app.segmented_control(key="playground_mode").set_value("JSON or curl").run()
    app.text_area(key="playground_pasted").set_value("{}").run()
    assert not app.exception, app.exception
    warnings = said(app, "warning")
    assert ("2 images in this request: this model will not see them" in warnings) is warned


def test_hostile_text_stays_in_cells_and_plain_text(page: Page) -> None:
    replies = answers("one bucket")
    for lease in replies["/admin/v1/leases"]:
        lease["workspace"] = lease["engine"] = HOSTILE
    for engine in (*replies["/admin/v1/engines"], *replies["/admin/v1/engines/memory"]):
        engine["name"] = HOSTILE
    replies["/admin/v1/engines/memory"][0]["model"] = HOSTILE
    for name in ("prefixes", "memory", "fleet"):
        app = page(name, replies)
        for element in (*app.markdown, *app.caption, *app.info, *app.metric, *app.subheader):
            assert "evil.test" not in str(element.value)
