"""Why a prefix was not read, in the extension and in the ledger, with real engines.

What engines find themselves is in tests/conformance."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.stack import ROOT, serving_engine, serving_gateway
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.prompts import handbook
from tests.gateway.serving import eventually

STEADY = {
    "ENGINE_CLOCK": "manual",
    "ENGINE_MIN_CACHE_TOKENS": "32",
    "ENGINE_NUM_BLOCKS": "4096",
    "ENGINE_SYNTHETIC_PREFILL_US": "0",
    "ENGINE_SYNTHETIC_DECODE_MS": "0",
}


REAL = {name: value for name, value in STEADY.items() if name != "ENGINE_CLOCK"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("steady"), 2, 1, STEADY) as fleet:
        yield fleet


@pytest.fixture
def steady(two: Fleet) -> Fleet:
    """The first engine alone is in use."""
    two.restored()
    two.gateway.use(1, "drain")
    return two


def reason(fleet: Fleet, *messages: Any, **changes: Any) -> str | None:
    name: str | None = fleet.gateway.answer(*messages, **changes)["holdfast"]["miss_reason"]
    return name


def talk(*marked: str) -> dict[str, Any]:
    """Of a body, the system prompt and messages, each text of which is marked."""
    parts = [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in marked
    ]
    question = [{"type": "text", "text": "Why?"}]
    return {"system": parts[:1], "messages": [{"role": "user", "content": parts[1:] + question}]}


def told_of(gateway: Gateway, *marked: str, **changes: Any) -> tuple[str | None, list[str | None]]:
    """The reason of a request, and those of its markers."""
    reply = gateway.send(**talk(*marked), max_tokens=4, **changes)
    assert reply.status_code == 200, reply.text
    holdfast = reply.json()["holdfast"]
    return holdfast["miss_reason"], [point["missed"] for point in holdfast["breakpoints"]]


def test_each_marker_has_its_own_reason(steady: Fleet) -> None:
    gateway = steady.gateway
    book, first, second = (handbook(20) for _ in range(3))
    assert told_of(gateway, book, first) == ("cold", ["cold", "cold"])
    assert told_of(gateway, book, first) == (None, [None, None])
    assert told_of(gateway, book, first, second) == (None, [None, None, "grew"])
    steady.advance(301)
    assert told_of(gateway, book, first) == ("ttl_expired", ["ttl_expired"] * 2)
    steady.kill()
    eventually(lambda: steady.num_ready() == 1)
    steady.restart()
    eventually(lambda: steady.num_ready() == 2)
    assert told_of(gateway, book) == ("engine_restart", ["engine_restart"])
    assert told_of(gateway, book, first) == ("engine_restart", [None, "engine_restart"])


def test_a_changed_message_is_told_of_the_markers_behind_it(steady: Fleet) -> None:
    gateway = steady.gateway
    book, first, second = (handbook(20) for _ in range(3))
    body = talk(book, first, second)
    begun = gateway.send(**body, max_tokens=4, diagnostics={"previous_message_id": None}).json()
    options = {"diagnostics": {"previous_message_id": begun["id"]}}
    reasons = told_of(gateway, book, first, handbook(20), **options)
    assert reasons == ("messages_changed", [None, None, "messages_changed"])


def test_cold_then_read_and_the_ledger_says_the_same(steady: Fleet) -> None:
    text = handbook(20)
    gateway = steady.gateway
    for expected in ("cold", None):
        answer = gateway.answer(text)
        assert answer["holdfast"]["miss_reason"] == expected
        assert gateway.recorded(answer["id"])["miss_reason"] == expected
        assert (answer["usage"]["cache_read_input_tokens"] > 0) == (expected is None)


def test_without_a_marker_it_is_no_breakpoint(steady: Fleet) -> None:
    assert reason(steady, [{"type": "text", "text": handbook(20)}]) == "no_breakpoint"


def test_after_its_ttl_it_is_expired(steady: Fleet) -> None:
    text = handbook(20)
    steady.gateway.answer(text)
    steady.advance(301)
    assert reason(steady, text) == "ttl_expired"


def test_a_changed_tool_is_named_where_the_client_asked_to_compare(steady: Fleet) -> None:
    text = handbook(20)
    first = steady.gateway.answer(text, diagnostics={"previous_message_id": None})
    diagnostics = {"previous_message_id": first["id"]}
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    answer = steady.gateway.answer(text, diagnostics=diagnostics, tools=tools)
    assert answer["diagnostics"]["cache_miss_reason"]["type"] == "tools_changed"
    assert answer["holdfast"]["miss_reason"] == "tools_changed"


def test_a_restarted_engine_is_told_from_a_cold_one(steady: Fleet) -> None:
    text = handbook(20)
    steady.gateway.answer(text)
    steady.kill()
    eventually(lambda: steady.num_ready() == 1)
    steady.restart()
    eventually(lambda: steady.num_ready() == 2)
    assert [reason(steady, text) for _ in range(2)] == ["engine_restart", None]
    assert reason(steady, handbook(20)) == "cold"


def test_a_prefix_that_another_engine_holds_was_routed_elsewhere(two: Fleet) -> None:
    two.restored()
    # Tests before leave some 5,900 tokens of recent load on one engine. By `gateway.routing.router`
    # that outweighs a prefix of 260 tokens, and not this one.
    text = handbook(120)
    first = two.gateway.answer(text)["holdfast"]["engine"]
    two.kill(int(first[-1]))
    eventually(lambda: two.num_ready() == 1)
    moved = two.gateway.answer(text)["holdfast"]
    assert moved["engine"] != first and moved["miss_reason"] == "routed_elsewhere"
    assert reason(two, text) is None
    two.restart(int(first[-1]))
    eventually(lambda: two.num_ready() == 2)
    holdfast = two.gateway.answer(text)["holdfast"]
    assert (holdfast["engine"], holdfast["miss_reason"]) == (moved["engine"], None)


def test_another_model_is_the_reason_and_diagnostics_say_the_same(tmp_path: Path) -> None:
    """Of two engines with a model each; the conversation goes from one to the other."""
    least = {"ENGINE_MIN_CACHE_TOKENS": "32"}
    text = handbook(20)
    folder = tmp_path / "other-model"
    shutil.copytree(ROOT / "engine" / "holdfast-demo", folder)
    with (
        serving_engine("synthetic", least) as first_engine,
        serving_engine("native", {**least, "ENGINE_MODEL": str(folder)}) as second_engine,
        serving_gateway(
            tmp_path / "data", [first_engine.wait().url, second_engine.wait().url]
        ) as served,
    ):
        gateway = Gateway(served.wait().url)
        eventually(lambda: [engine["status"] for engine in gateway.get("engines")] == ["ready"] * 2)
        first = gateway.answer(text, diagnostics={"previous_message_id": None})
        diagnostics = {"previous_message_id": first["id"]}
        answer = replace(gateway, model="other-model").answer(text, diagnostics=diagnostics)
        assert answer["diagnostics"]["cache_miss_reason"]["type"] == "model_changed"
        assert answer["holdfast"]["miss_reason"] == "model_changed"


def test_what_the_ledger_knows_is_not_cold_after_both_were_started_again(tmp_path: Path) -> None:
    text = handbook(20)
    with running_fleet(tmp_path, 1, 1, REAL) as fleet:
        for _ in range(3):
            answer = fleet.gateway.answer(text)
        fleet.gateway.recorded(answer["id"])
        fleet.kill()
        fleet.restart()
        quiet = {"HOLDFAST_LOG_LEVEL": "error"}
        with serving_gateway(tmp_path / "other", fleet.engines, quiet) as fresh:
            unknown = Gateway(fresh.wait().url).answer(text)
            assert unknown["holdfast"]["miss_reason"] == "cold", "another ledger"
        fleet.kill()
        fleet.restart()
    with running_fleet(tmp_path, 1, 1, REAL) as again:
        assert reason(again, text) == "engine_restart"
        assert reason(again, handbook(20)) == "cold"


def test_a_changed_system_prompt_is_named_to_who_did_not_ask(steady: Fleet) -> None:
    """Where both begin alike as far as a name, so that it is not just another prompt."""
    book = handbook(300)
    assert reason(steady, f"{book} Today is Sunday.") == "cold"
    assert reason(steady, f"{book} Today is Monday.") == "system_changed"
    tool = {"name": "look", "description": "d" * 600, "input_schema": {"type": "object"}}
    text = handbook(20)
    assert reason(steady, text, tools=[tool]) == "cold"
    assert reason(steady, f"New. {text}", tools=[tool]) == "system_changed"
