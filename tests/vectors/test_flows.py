"""The vectors that are more than a sequence of turns; a test's name ends with its numbers."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic

from tests.fuzz.houses import serving
from tests.gateway.prompt.test_breakpoints import BROKEN
from tests.gateway.serving import eventually
from tests.vectors.conftest import MODELS_TOML
from tests.vectors.test_counts import TURN1, Q, S, held, levels
from tests.vectors.world import HEADERS, MODEL, Block, Vector, World, said, system, tool

MARK = {"type": "ephemeral"}


def usage(response: httpx.Response) -> tuple[int, int]:
    """(read, written)."""
    assert response.status_code == 200, response.text
    counted = response.json()["usage"]
    return counted["cache_read_input_tokens"], counted["cache_creation_input_tokens"]


def refusal(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    message: str = error["message"]
    return message


@contextmanager
def streamed(vector: Vector, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a response, as they come."""
    url = f"{vector.world.url}/v1/messages"
    key = vector.world.keys["default"]
    headers = {**HEADERS, "x-api-key": key}
    with httpx.stream(
        "POST", url, json={**body, "stream": True}, headers=headers, timeout=120
    ) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        yield (json.loads(line[6:]) for line in lines if line.startswith("data: "))


# What may differ on the wire.


def test_the_bodys_keys_in_another_order_v16(vector: Vector) -> None:
    body, *_ = vector.body(*levels())
    assert usage(vector.world.post("messages", body)) == (0, 3000)
    assert usage(vector.world.post("messages", dict(reversed(body.items())))) == (3000, 0)


def test_null_markers_are_none_v17(vector: Vector) -> None:
    body, *_ = vector.body(system("s", 2000), Q)
    for block in (*body["system"], *body["messages"][0]["content"]):
        block["cache_control"] = None
    assert usage(vector.world.post("messages", {**body, "cache_control": None})) == (0, 0)


def test_an_omitted_ttl_is_five_minutes_v18(vector: Vector) -> None:
    body, *_ = vector.body(S, Q)
    body["system"][0]["cache_control"] = MARK
    assert usage(vector.world.post("messages", body)) == (0, 2000)
    assert vector.ask(S, Q) == (54, 2000, 0, 0)


def test_a_string_is_one_block_v19(vector: Vector) -> None:
    body, *_ = vector.body(*TURN1, auto="5m")
    as_string = {**body, "system": body["system"][0]["text"]}
    assert usage(vector.world.post("messages", as_string)) == (0, 2100)
    assert vector.ask(*TURN1, auto="5m") == (4, 2100, 0, 0)


def test_tools_in_another_order_v23(vector: Vector) -> None:
    body, *_ = vector.body(tool("t", 750), tool("u", 750), *levels()[1:])
    assert usage(vector.world.post("messages", body)) == (0, 3000)
    body["tools"].reverse()
    read_tokens, written_tokens = usage(vector.world.post("messages", body))
    assert read_tokens == 0 and written_tokens > 2900


def test_the_order_of_keys_in_a_calls_input_matters_v28(vector: Vector) -> None:
    body, *_ = vector.body(
        S,
        said("u", 50),
        Block("M", "c", 60, None, "tool_use", 1),
        Block("M", "cr", 1000, "5m", "tool_result", 2),
    )
    call = body["messages"][1]["content"][0]
    call["input"] = {"a": 1, "b": 2}
    read_tokens, written_tokens = usage(vector.world.post("messages", body))
    assert read_tokens == 0 and written_tokens > 3000
    call["input"] = {"b": 2, "a": 1}
    assert usage(vector.world.post("messages", body)) == (2000, written_tokens - 2000)


def test_a_system_message_in_the_midst_loses_nothing_v29(vector: Vector) -> None:
    body, *_ = vector.body(S, said("u", 100, "5m"))
    assert usage(vector.world.post("messages", body)) == (0, 2100)
    later = {**body, "messages": [*body["messages"], {"role": "system", "content": "Be brief."}]}
    assert usage(vector.world.post("messages", later)) == (2100, 0)
    body["system"][0]["text"] += " More."
    assert usage(vector.world.post("messages", body))[0] == 0


def cited(is_cited: bool) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": "x"}
    document = {"type": "document", "source": source, "citations": {"enabled": is_cited}}
    return {"messages": [{"role": "user", "content": [document]}]}


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ({}, {"speed": "fast"}, "speed"),
        ({}, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        (cited(False), cited(True), "messages.0.content.0.document.citations"),
    ],
    ids=["speed", "web-search", "citations"],
)
def test_what_cannot_be_toggled_is_told_and_loses_nothing_v22(
    vector: Vector, before: dict[str, Any], after: dict[str, Any], field: str
) -> None:
    """What does not change the prompt's tokens is a full hit (the spec's section 9)."""
    body, *_ = vector.body(S, Q)
    assert usage(vector.world.post("messages", {**body, **before})) == (0, 2000)
    toggled = vector.world.post("messages", {**body, **after})
    assert usage(toggled) == (2000, 0)
    assert [entry["path"] for entry in toggled.json()["holdfast"]["ignored"]] == [field]


def test_an_image_that_is_added_loses_nothing_before_it_v24(vector: Vector) -> None:
    body, *_ = vector.body(S, Q)
    assert usage(vector.world.post("messages", body)) == (0, 2000)
    source = {"type": "url", "url": "https://example.com/x.png"}
    image = {"type": "image", "source": source, "cache_control": MARK}
    body["messages"][0]["content"].append(image)
    read_tokens, written_tokens = usage(vector.world.post("messages", body))
    assert read_tokens == 2000 and written_tokens > 50
    assert usage(vector.world.post("messages", body)) == (read_tokens + written_tokens, 0)


# Errors.


@pytest.mark.parametrize("request_body, message", BROKEN)
def test_a_broken_rule_over_http_v40_v41_v42_v44_v45_v46_v47_v49_v50_v51_v52_v53_v54_v55_v56_v57(
    world: World, request_body: dict[str, Any], message: str
) -> None:
    """On both endpoints; nothing is written."""
    body = {**request_body, "model": MODEL}
    assert refusal(world.post("messages", body)) == message
    counting = {key: value for key, value in body.items() if key != "max_tokens"}
    assert refusal(world.post("messages/count_tokens", counting)) == message
    assert world.machines.engines[0].stats().num_entries == 0


def test_a_marker_on_the_last_nested_block_is_its_parents_v54(vector: Vector) -> None:
    body, *_ = vector.body(
        said("u", 2000),
        Block("M", "c", 60, None, "tool_use", 1),
        Block("M", "cr", 100, None, "tool_result", 2),
    )
    result = body["messages"][2]["content"][0]
    result["content"] = [{"type": "text", "text": result["content"], "cache_control": MARK}]
    assert usage(vector.world.post("messages", body)) == (0, 2160)


def test_a_last_thinking_block_is_a_prefill_here_v96(vector: Vector) -> None:
    """So the automatic marker's walk past it is tested on the target picker itself."""
    thought = Block("M", "thought", 70, None, "thinking", 1)
    body, *_ = vector.body(S, said("u", 50), thought, said("end", 20, message=2))
    del body["messages"][2]
    assert "prefill" in refusal(vector.world.post("messages", body))


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": True},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "t0"}},
    ],
    ids=["stream", "thinking", "format", "any", "tool"],
)
def test_a_prewarm_refuses_v99(vector: Vector, changes: dict[str, Any]) -> None:
    body, *_ = vector.body(tool("t", 100), S, Q, max_tokens=0)
    refusal(vector.world.post("messages", {**body, **changes}))


# Time and concurrency.


def test_twins_that_overlap_both_write_and_the_third_reads_v73_v74(vector: Vector) -> None:
    world = vector.world
    engine = vector.world.machines.engines[0]
    body, tail, total = vector.body(*held("5m"))
    with ThreadPoolExecutor(2) as pool, world.machines.full(0) as blockers:
        first = pool.submit(world.post, "messages", body)
        eventually(lambda: engine.stats().waiting == 1)
        vector.wait_until(1)
        second = pool.submit(world.post, "messages", body)
        eventually(lambda: engine.stats().waiting == 2)
        vector.wait_until(2)
        for blocker in blockers:
            engine.cancel(blocker.request_id)
        blockers.clear()
        for future in (first, second):
            assert vector.counts(future.result().json(), tail, total) == (104, 0, 2000, 0)
    assert vector.ask(*held("5m"), at=3) == (104, 2000, 0, 0)


def test_a_ttl_counts_from_the_start_of_a_long_response_v75(vector: Vector) -> None:
    body, *_ = vector.body(*held("5m"), max_tokens=2000)
    with streamed(vector, body) as events:
        assert next(events)["type"] == "message_start"
        vector.wait_until(250)
    assert vector.ask(*held("5m"), at=301) == (104, 0, 2000, 0)


def test_ten_at_once_all_read_v82(vector: Vector) -> None:
    vector.ask(*held("5m"))
    body, *_ = vector.body(*held("5m"))
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(vector.world.post, "messages", body) for _ in range(10)]
        assert [usage(future.result()) for future in futures] == [(2000, 0)] * 10


def test_a_client_that_leaves_after_the_first_event_has_written_v83(vector: Vector) -> None:
    body, *_ = vector.body(*held("5m"), max_tokens=2000)
    with streamed(vector, body) as events:
        assert next(events)["type"] == "message_start"
    assert vector.ask(*held("5m"), at=1) == (104, 2000, 0, 0)


def test_who_fails_before_the_first_byte_has_written_nothing_v79(vector: Vector) -> None:
    world = vector.world
    engine = vector.world.machines.engines[0]
    body, *_ = vector.body(*held("5m"))
    with world.machines.full(0):
        with streamed(vector, body):
            eventually(lambda: engine.stats().waiting == 1)
        eventually(lambda: engine.stats().waiting == 0)
    assert vector.ask(*held("5m"), at=1) == (104, 0, 2000, 0)


# Isolation.


def test_another_installation_reads_nothing_v81(vector: Vector, tmp_path: Path) -> None:
    """An organization is an installation: its master secret salts every scope."""
    assert vector.ask(S, Q) == (54, 0, 2000, 0)
    secret = "another-master-secret-0000000000"
    with serving(tmp_path, vector.world.machines, MODELS_TOML, ["default"], secret) as (url, keys):
        stranger = Vector(World(vector.world.machines, url, {"default": keys[0]}), vector.name)
        assert stranger.ask(S, Q) == (54, 0, 2000, 0)


def test_another_workspace_computes_everything_itself_v85(vector: Vector) -> None:
    """Where its first token's time comes from; nothing of the other's memory is used."""
    body, _, total = vector.body(S, Q)
    for key in ("default", "second"):
        extension = vector.world.post("messages", body, key).json()["holdfast"]
        assert (extension["computed_tokens"], extension["automatic_tokens"]) == (total, 0)


# Usage.


def test_a_stream_says_the_same_v110_v111(vector: Vector) -> None:
    body, tail, total = vector.body(S, Q)
    assert vector.ask(S, Q) == (54, 0, 2000, 0)
    whole = vector.world.post("messages", body).json()
    with streamed(vector, body) as events:
        by_type = {event["type"]: event for event in events}
    start = by_type["message_start"]["message"]
    delta = by_type["message_delta"]["usage"]
    assert vector.counts(start, tail, total) == vector.counts(whole, tail, total)
    assert "cache_creation" not in delta
    assert delta["output_tokens"] == whole["usage"]["output_tokens"]
    assert delta["cache_read_input_tokens"] == 2000
    with Anthropic(
        base_url=vector.world.url,
        api_key=vector.world.keys["default"],
        max_retries=0,
        timeout=120,
    ) as client:
        del body["temperature"]
        with client.messages.stream(**body) as stream:
            final = stream.get_final_message().usage
        assert final == client.messages.create(**body).usage


def test_counting_neither_refreshes_nor_writes_v112_v113(vector: Vector) -> None:
    body, _, total = vector.body(*held("5m"))
    counting = {"model": MODEL, "messages": body["messages"], "system": body["system"]}
    for at in (0.0, 299.0):
        vector.wait_until(at)
        counted = vector.world.post("messages/count_tokens", counting)
        assert counted.json() == {"input_tokens": total}
        if at == 0:
            assert vector.ask(*held("5m")) == (104, 0, 2000, 0)
    assert vector.ask(*held("5m"), at=300) == (104, 0, 2000, 0)


def test_batches_are_taken_and_regions_are_refused_v126(vector: Vector) -> None:
    body, *_ = vector.body(S, Q)
    batch = {"requests": [{"custom_id": "one", "params": body}]}
    taken = vector.world.post("messages/batches", batch)
    assert (taken.status_code, taken.json()["processing_status"]) == (200, "in_progress")
    refused = refusal(vector.world.post("messages", {**body, "inference_geo": "us"}))
    assert refused.startswith("inference_geo: ")
    path = f"messages/batches/{taken.json()['id']}"  # what it writes must not meet another vector
    eventually(lambda: vector.world.get(path).json()["processing_status"] == "ended")


def test_either_header_carries_the_key_v127(vector: Vector) -> None:
    body, *_ = vector.body(said("q", 50))
    key = vector.world.keys["default"]
    for header in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
        url = f"{vector.world.url}/v1/messages"
        reply = httpx.post(url, json=body, headers={**HEADERS, **header}, timeout=120)
        assert reply.status_code == 200


def test_the_newer_version_refuses_sampling_parameters_v128(vector: Vector) -> None:
    body, *_ = vector.body(said("q", 50))
    plain = {name: value for name, value in body.items() if name != "temperature"}
    newer = {"anthropic-version": "2026-10-21"}
    assert vector.world.post("messages", {**plain, "temperature": 1}).status_code == 200
    refused = refusal(vector.world.post("messages", {**plain, "temperature": 1}, **newer))
    assert refused.startswith("temperature: ")
    assert vector.world.post("messages", plain, **newer).status_code == 200


def test_an_answer_goes_back_verbatim_and_reads_what_was_asked_v129(vector: Vector) -> None:
    body, *_ = vector.body(said("u", 1100), auto="5m", max_tokens=8)
    first = vector.world.post("messages", body)
    assert usage(first) == (0, 1100)
    answer = {"role": "assistant", "content": first.json()["content"]}
    body["messages"] += [answer, {"role": "user", "content": "What is a lease?"}]
    assert usage(vector.world.post("messages", body))[0] == 1100


def test_what_was_written_is_read_in_the_next_turn_v130(vector: Vector) -> None:
    rng = random.Random(130)
    blocks = [said("u0", 1100)]
    message = 0
    held_tokens = 0
    for turn in range(8):
        _, read_tokens, written_tokens, _ = vector.ask(*blocks, auto="5m", at=turn * 299.0)
        assert read_tokens == held_tokens
        held_tokens = read_tokens + written_tokens
        for index in range(rng.choice([1, 5, 18])):
            name = f"a{turn}.{index}"
            blocks.append(said(name, rng.randint(60, 90), message=message + 1))
        message += 2
        blocks.append(said(f"u{turn + 1}", rng.randint(60, 90), message=message))
