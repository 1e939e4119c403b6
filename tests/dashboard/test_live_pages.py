"""The pages that show engines, in Streamlit's harness, in every state that data can be in."""

from collections.abc import Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import live_answers
from tests.dashboard.fake_admin import ADMIN_KEY, FakeAdmin, serve_fake
from tests.dashboard.live_answers import STATES, about, answers
from tests.dashboard.signed_in import open_page, sign_in

PAGES = ("prefixes", "memory", "latency", "fleet", "playground")
HOSTILE = "![x](http://evil.test/x.png) :red[boo] <img src=x> $a$"


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with serve_fake() as fake:
        yield fake


@pytest.fixture
def show(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> Any:
    def open_in(name: str, found: dict[str, Any]) -> AppTest:
        admin.answers = found
        sign_in(monkeypatch, admin.url, ADMIN_KEY)
        return open_page(name)

    return open_in


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_stands_in_every_state(show: Any, name: str, state: str) -> None:
    app = show(name, answers(state))
    assert not app.exception
    assert not app.error, [each.value for each in app.error]
    if state == "empty":
        assert app.info, "an empty page says that it is, and why"
    assert app.title[0].value


@pytest.mark.parametrize("name", PAGES)
def test_a_gateway_that_is_away_is_said(show: Any, admin: FakeAdmin, name: str) -> None:
    app = show(name, answers("one row"))
    admin.status = 503
    app.run()
    assert not app.exception
    shown = [each.value for each in (*app.error, *app.warning)]
    assert any("503" in text for text in shown), shown
    admin.status = 200
    app.run()
    assert not app.error and not app.warning


def test_leases_have_time_left_size_and_net(show: Any) -> None:
    app = show("prefixes", answers("one row"))
    shown = metrics(app)
    assert (shown["Leases"], shown["Ttl left"]) == ("1", "4:07")
    row = app.dataframe[0].value.iloc[0]
    assert (row["Ends in"], row["Tokens"], row["Shared by"], row["Reads"]) == ("4:07", 2048, 1, 3)
    assert row["Net saved ($)"] == 5.0 and row["TTL left"] == pytest.approx(247 / 300)


def test_a_loss_of_what_is_held_is_shown_as_one(show: Any) -> None:
    shown = metrics(show("prefixes", answers("negative savings")))
    assert shown["Lease saved nano"].startswith(":red[−$")


def test_only_an_admin_is_offered_to_drop(show: Any) -> None:
    found = answers("one row")
    assert any("Pick a row" in each.value for each in show("prefixes", found).caption)
    found["/admin/v1/about"] = about(workspace="mine")
    app = show("prefixes", found)
    assert not any("Pick a row" in each.value for each in app.caption)


def test_what_became_of_a_drop_is_said_by_a_run_of_the_whole_page(show: Any) -> None:
    """A click may come with a run of the whole page, as after a lost connection."""
    found = answers("one row")
    app = show("prefixes", found)
    lease = found["/admin/v1/leases"][0]
    app.session_state["lease_to_drop"] = lease["entry"]["entry"], lease["engine"]
    app.run()
    button = next(one for one in app.button if one.label.startswith("Drop it"))
    button.click().run()
    assert not app.exception
    # The gateway of this harness knows no DELETE.
    assert "The gateway could not drop it. Nothing has changed." in [one.value for one in app.info]


@pytest.mark.parametrize("name", ["memory", "fleet"])
def test_what_all_workspaces_share_is_for_admins(show: Any, admin: FakeAdmin, name: str) -> None:
    app = show(name, {**answers("one row"), "/admin/v1/about": about(workspace="mine")})
    assert "needs an admin key" in app.info[0].value
    assert not any("/engines/memory" in path for path in admin.asked)


def test_memory_shows_shares_and_waste(show: Any) -> None:
    shown = metrics(show("memory", answers("one bucket")))
    assert shown["Pool in use"] == "50.0%" and shown["Copied blocks"] == "3"
    assert shown["Unused tokens"] == "12.5%"  # 64 tokens in 32 blocks of 16


def test_memory_and_fleet_show_the_share_of_other_clients(show: Any) -> None:
    found = answers("one bucket")
    shared = found["/admin/v1/engines/memory"][0]["stats"]
    shared["foreign_running"] = 3
    shared["blocks"] |= {"foreign": 8, "active": 16, "free": 0}
    found["/admin/v1/engines"][0]["stats"] = shared
    memory = show("memory", found)
    assert [m.delta for m in memory.metric if m.label == "Pool in use"] == [
        "12.5% by other clients"
    ]
    pool = memory.dataframe[-1].value
    assert pool[pool["Blocks are"] == "Foreign"][["Blocks", "Share"]].values.tolist() == [
        [8, 0.125]
    ]
    fleet = show("fleet", found).dataframe[0].value
    assert fleet[["Foreign", "Foreign running"]].values.tolist() == [[0.125, 3]]


def test_memory_of_an_engine_that_nobody_else_uses_tells_of_no_foreign_share(show: Any) -> None:
    app = show("memory", answers("one bucket"))
    assert [m.delta for m in app.metric if m.label == "Pool in use"] == [""]


def test_memory_shows_the_store_on_disk(show: Any) -> None:
    found = answers("one bucket")
    stats = found["/admin/v1/engines/memory"][0]["stats"]
    stats["store"] = {
        "is_up": True,
        "max_bytes": 2**31,
        "used_bytes": 2**21,
        "entries": 5,
        "leases": 4,
        "misses": {"short": 2, "checksum": 1},
    }
    row = show("memory", found).dataframe[0].value.iloc[0]
    assert (row["State"], row["MiB"], row["Of MiB"]) == ("on", 2.0, 2048.0)
    assert (row["Entries"], row["Leases"], row["Damaged"]) == (5, 4, 3)
    assert row["Damages"] == "1 checksum, 2 short"
    stats["store"] = {"is_up": False, "refused": "newer"}
    row = show("memory", found).dataframe[0].value.iloc[0]
    assert row["State"] == "off: it is of a newer version"


def test_an_engine_without_a_map_says_so(show: Any) -> None:
    found = answers("one bucket")
    found["/admin/v1/engines/memory"][0]["memory"] |= {"cells": [], "unused_tokens": None}
    app = show("memory", found)
    assert not app.exception and "No map" in app.info[0].value
    assert metrics(app)["Unused tokens"] == "–"


def test_latency_compares_prompts_of_one_length(show: Any) -> None:
    assert metrics(show("latency", answers("one bucket")))["Sooner when cached"] == "13×"
    few = metrics(show("latency", answers("one row")))
    assert few["Sooner when cached"] == "–", "one turn of each is no comparison"


def test_fleet_counts_what_restarts_cost(show: Any) -> None:
    shown = metrics(show("fleet", answers("one bucket")))
    assert shown["Engines ready"] == "1 of 1" and shown["Restart lost"] == "144K"
    assert shown["Held tokens delivered"] == "91.4%"


def test_fleet_shows_what_each_engine_promises_and_why_not(show: Any) -> None:
    found = answers("one bucket")
    [own] = found["/admin/v1/engines"]
    others = [
        {"name": "exact_read", "is_kept": False, "note": "not told: start it with --tell"},
        {"name": "hold", "is_kept": False, "note": "no_hold: the server evicts when it wants"},
    ]
    before = own["description"] | {"backend": "upstream", "upstream": "vllm", "guarantees": others}
    found["/admin/v1/engines"] = [
        own,
        own | {"name": "engine-1"},
        own | {"name": "engine-2", "description": before},
        live_answers.engine_now(is_up=False, name="engine-3"),
    ]
    app = show("fleet", found)
    table = next(f.value for f in app.dataframe if "Promise" in f.value)
    rows = table.values.tolist()
    of_reads = ["A read is what memory reused"]
    assert rows[:2] == [
        [*of_reads, "yes", "from its blocks", "native", "engine-0, engine-1"],
        [*of_reads, "no", "not told: start it with --tell", "vllm, as it is", "engine-2"],
    ]
    assert len(rows) == 6 + 2


def test_fleet_without_a_promise_says_so(show: Any) -> None:
    found = answers("one bucket")
    del found["/admin/v1/engines"][0]["description"]["guarantees"]
    app = show("fleet", found)
    assert any("what it promises" in info.value for info in app.info)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample": True}, "sample data"),
        ({"may_send": False, "workspace": "mine"}, "can't send"),
        ({"may_send": False}, "Pick the workspace"),
    ],
)
def test_the_playground_says_why_it_cannot_send(
    show: Any, changes: dict[str, Any], said: str
) -> None:
    found = {**answers("one row"), "/admin/v1/about": about(**changes)}
    app = show("playground", found)
    assert said in app.info[0].value and not app.text_area


def playground(show: Any) -> AppTest:
    app: AppTest = show(
        "playground", {**answers("one row"), "/admin/v1/about": about(workspace="mine")}
    )
    assert not app.exception and not app.error
    return app


def texts(app: AppTest) -> list[str]:
    return [area.value for area in app.text_area]


def test_blocks_are_added_moved_and_taken_out(show: Any) -> None:
    app = playground(show)
    handbook, rules, question = texts(app)
    app.button(key="add_tool").click().run()
    assert len(texts(app)) == 4 and "log_ship" in texts(app)[-1]
    app.button(key="move_down_1").click().run()
    assert texts(app)[:2] == [rules, handbook]
    app.button(key="drop_1").click().run()
    assert handbook not in texts(app) and question in texts(app)
    code = " ".join(each.value for each in app.code)
    assert '"tools"' in code and "log_ship" in code and "HOLDFAST_API_KEY" in code


def test_what_the_gateway_reads_in_a_paste_is_taken_apart_into_blocks(
    show: Any, admin: FakeAdmin
) -> None:
    app = playground(show)
    app.segmented_control(key="playground_mode").set_value("JSON or curl").run()
    body = {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
    read = {"dialect": "messages", "tokens": 9, "findings": [], "marked": None, "blocks": []}
    report = {"text": "", "num_turns": 0, "is_cut": False, "streams": [], "num_without_sketch": 0}
    report |= {"requests": [read | {"body": body, "as_messages": body}]}
    admin.answers["/admin/v1/advise"] = report | {"since_ms": None, "until_ms": None}
    app.text_area(key="playground_pasted").set_value("curl http://x/v1/messages …").run()
    assert not app.error and any("Anthropic Messages" in each.value for each in app.caption)
    app.button(key="take_apart").click().run()
    assert texts(app) == ["Be brief.", "Hi"]
    assert not app.exception


def test_what_is_no_request_is_said_and_not_sent(show: Any, admin: FakeAdmin) -> None:
    app = playground(show)
    app.segmented_control(key="playground_mode").set_value("JSON or curl").run()
    admin.refused.add("/admin/v1/advise")
    app.text_area(key="playground_pasted").set_value("curl -d @file.json http://x").run()
    assert app.error and app.button(key="send").disabled


def test_hostile_text_stays_in_cells_and_plain_text(show: Any) -> None:
    found = answers("one bucket")
    for lease in found["/admin/v1/leases"]:
        lease["workspace"] = lease["engine"] = HOSTILE
    for engine in (*found["/admin/v1/engines"], *found["/admin/v1/engines/memory"]):
        engine["name"] = HOSTILE
    found["/admin/v1/engines/memory"][0]["model"] = HOSTILE
    for name in ("prefixes", "memory", "fleet"):
        app = show(name, found)
        assert not app.exception
        for element in (*app.markdown, *app.caption, *app.info, *app.metric, *app.subheader):
            assert "evil.test" not in str(element.value)
