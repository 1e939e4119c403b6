"""Spans of a turn and of its engines' work, as a collector gets them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic

from engine.protocol import ErrorReply
from gateway.base.traces import TracesError
from scripts.stack import API_KEY, ENGINE_SECRET, Stack, running_stack
from tests.gateway import serving
from tests.gateway.bodies import body
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import eventually, serve, serve_gateway

pytest.importorskip("opentelemetry.sdk")
from tests.gateway.turn.collector import Collector, Span, collecting, collecting_grpc

SERVER = 2
CLIENT = 3
INTERNAL = 1
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SECRET_WORDS = "The heron counts forty two stones"


def environment(collector: Collector) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
    }


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module", params=["synthetic", "native"])
def stack(
    request: pytest.FixtureRequest, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    engine = {"ENGINE_MIN_CACHE_TOKENS": "16"}
    gateway = {**environment(collector), "HOLDFAST_TRACES": "true"}
    data = tmp_path_factory.mktemp("traces")
    with running_stack(data, request.param, engine, gateway) as running:
        yield running


def ask(stack: Stack, trace: str, *, stream: bool = False) -> str:
    """One turn of a client that has a trace already. Return the turn's id."""
    block = {"type": "text", "text": f"{SECRET_WORDS}. " * 40}
    block["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
    with Anthropic(base_url=stack.gateway, api_key=API_KEY, max_retries=0, timeout=120) as sdk:
        answer = sdk.messages.create(
            model=sdk.models.list().data[0].id,
            max_tokens=4,
            system=[block],  # type: ignore[list-item]
            messages=[{"role": "user", "content": SECRET_WORDS}],
            extra_headers={"traceparent": f"00-{trace}-{PARENT}-01"},
        )
    return answer.id


def spans_of(collector: Collector, trace: str, number: int) -> list[Span]:
    eventually(lambda: len(collector.trace(trace)) >= number)
    time.sleep(0.3)  # for one too many
    spans = collector.trace(trace)
    assert len(spans) == number, [span.name for span in spans]
    return spans


def test_a_turn_is_one_trace_with_what_was_read_and_without_a_word_of_the_prompt(
    stack: Stack, collector: Collector
) -> None:
    ask(stack, os.urandom(16).hex())
    trace = os.urandom(16).hex()
    turn_id = ask(stack, trace)
    spans = spans_of(collector, trace, 6)
    turn, call, *parts = spans
    parts.sort(key=lambda part: (part.began, part.ended))
    assert (turn.service, turn.kind, turn.parent) == ("holdfast-gateway", SERVER, PARENT)
    assert turn.name == f"chat {turn.attributes['gen_ai.request.model']}"
    assert (call.name, call.kind, call.parent) == ("engine_call", CLIENT, turn.id)
    assert [part.name for part in parts] == ["look_up", "queue", "prefill", "decode"]
    assert {(part.parent, part.kind) for part in parts} == {(call.id, INTERNAL)}
    for before, after in pairwise(parts):
        assert before.began <= before.ended == after.began <= after.ended
    assert turn.began <= call.began <= parts[0].began <= parts[-1].ended <= call.ended
    assert call.ended <= turn.ended
    assert not any(span.is_error for span in spans)
    for span in (turn, call):
        read_tokens = span.attributes["gen_ai.usage.cache_read.input_tokens"]
        assert isinstance(read_tokens, int) and read_tokens > 100
        assert span.attributes["gen_ai.usage.cache_creation.input_tokens"] == 0
        assert span.attributes["gen_ai.usage.input_tokens"] > read_tokens
        assert span.attributes["holdfast.cache.tier"] == "device"
        assert span.attributes["gen_ai.operation.name"] == "chat"
    attributes = turn.attributes
    assert attributes["gen_ai.usage.output_tokens"] > 0  # type: ignore[operator]
    assert (attributes["gen_ai.response.id"], attributes["http.response.status_code"]) == (
        turn_id,
        200,
    )
    assert attributes["holdfast.lease.state"] == "leased"
    assert 0 < attributes["holdfast.lease.seconds"] <= 300  # type: ignore[operator]
    assert str(attributes["holdfast.request_id"]).startswith("req_")
    words = (*SECRET_WORDS.split(), API_KEY, ENGINE_SECRET)
    assert not [word for word in words if word.encode() in collector.raw]


def test_the_spans_go_by_grpc_too(tmp_path: Path) -> None:
    with collecting_grpc() as collector:
        shared = environment(collector) | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
        shared["OTEL_EXPORTER_OTLP_INSECURE"] = "true"
        gateway = {**shared, "HOLDFAST_TRACES": "true"}
        with running_stack(tmp_path, "synthetic", {}, gateway) as stack:
            trace = os.urandom(16).hex()
            ask(stack, trace)
            spans = spans_of(collector, trace, 6)
    assert {event for span in spans for event in span.events} == {
        "holdfast.admitted",
        "holdfast.first_frame",
    }


# What needs engines that fail: scripted ones.


@contextmanager
def gateway(
    monkeypatch: pytest.MonkeyPatch, data: Path, endpoint: str, *engines: str, **variables: str
) -> Iterator[str]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with serve_gateway(data, *engines, traces=True) as url:
        yield url


def headers(traceparent: str) -> dict[str, str]:
    common = {"x-api-key": serving.API_KEY, "anthropic-version": "2023-06-01"}
    return {**common, "traceparent": traceparent}


def post(url: str, trace: str = TRACE, **changes: Any) -> httpx.Response:
    trace_headers = headers(f"00-{trace}-{PARENT}-01")
    return httpx.post(
        f"{url}/v1/messages", json=body(**changes), headers=trace_headers, timeout=120
    )


def test_a_retry_at_another_engine_is_a_second_call_of_one_trace(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ScriptedEngine(breaks_early=True)
    second = ScriptedEngine()
    with (
        serve(first) as first_url,
        serve(second) as second_url,
        gateway(monkeypatch, tmp_path, collector.url, first_url, second_url) as url,
    ):
        for number in range(60):
            trace = os.urandom(16).hex()
            messages = [{"role": "user", "content": f"question {number}"}]
            assert post(url, trace, messages=messages).status_code == 200
            if first.requests:
                break
        turn, broken, whole, *_ = spans_of(collector, trace, 7)
    assert {broken.parent, whole.parent} == {turn.id}
    assert (broken.attributes["server.address"], whole.attributes["server.address"]) == (
        "engine-0",
        "engine-1",
    )
    assert (broken.is_error, whole.is_error, turn.is_error) == (True, False, False)
    assert broken.attributes["error.type"] == "EngineLost"
    assert broken.ended <= whole.began
    assert turn.attributes["holdfast.attempts"] == whole.attributes["holdfast.attempt"] == 2


def test_a_turn_that_fails_and_one_whose_client_leaves_are_errors(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    engine.refusal = ErrorReply("prompt_too_long", "prompt is too long: 9 tokens > 8 maximum")
    refused = os.urandom(16).hex()
    left = os.urandom(16).hex()
    with (
        serve(engine) as engine_url,
        gateway(monkeypatch, tmp_path, collector.url, engine_url) as url,
    ):
        assert post(url, refused).status_code == 400
        turn, call = spans_of(collector, refused, 2)
        engine.refusal = None
        engine.script = say(*["word "] * 2_000, delay=0.05)
        trace_headers = headers(f"00-{left}-{PARENT}-01")
        path = f"{url}/v1/messages"
        request = body(stream=True)
        with httpx.stream("POST", path, json=request, headers=trace_headers, timeout=120) as reply:
            next(reply.iter_lines())
        # Which parts of the engine's work it has depends on when the client left.
        eventually(lambda: any(span.parent == PARENT for span in collector.trace(left)))
        gone = collector.trace(left)[0]
    assert turn.is_error and call.is_error
    assert turn.attributes["error.type"] == "invalid_request_error"
    assert turn.attributes["http.response.status_code"] == 400
    assert gone.is_error and gone.attributes["holdfast.outcome"] == "client_disconnect"


def test_a_traceparent_that_is_not_one_begins_a_new_trace(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serve(ScriptedEngine()) as engine_url,
        gateway(monkeypatch, tmp_path, collector.url, engine_url) as url,
    ):
        for wrong in ("", "00-zz-yy-01", "x" * 5000, f"00-{'0' * 32}-{PARENT}-01"):
            before = len(collector.spans)
            path = f"{url}/v1/messages"
            reply = httpx.post(path, json=body(), headers=headers(wrong), timeout=120)
            assert reply.status_code == 200
            eventually(lambda before=before: len(collector.spans) == before + 6)
            spans = {span.name: span for span in collector.spans[before:]}
            call = spans.pop("engine_call")
            [turn] = (span for name, span in spans.items() if name.startswith("chat "))
            assert turn.parent == "" and call.parent == turn.id
            assert len({span.trace for span in spans.values()}) == 1


def test_a_slow_collector_holds_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has room for four spans, and each turn has six.

    The first collector answers when all turns are over. A turn that waited for it would wait for
    longer than its client does.
    """
    room = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "4",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
    }
    with collecting() as slow, serve(ScriptedEngine()) as engine_url:
        slow.may_answer.clear()
        with gateway(monkeypatch, tmp_path / "slow", slow.url, engine_url, **room) as url:
            try:
                ask_often(url)
            finally:
                slow.may_answer.set()
        room["OTEL_EXPORTER_OTLP_TIMEOUT"] = "2"
        with gateway(
            monkeypatch, tmp_path / "away", "http://127.0.0.1:9", engine_url, **room
        ) as url:
            ask_often(url)


def ask_often(url: str) -> None:
    assert all(post(url, os.urandom(16).hex()).status_code == 200 for _ in range(12))


def test_a_wrong_protocol_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(TracesError, match="carrier-pigeon"), serve_gateway(tmp_path, traces=True):
        pass
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with (
        serve(ScriptedEngine()) as engine_url,
        serve_gateway(tmp_path, engine_url, traces=True) as url,
    ):
        assert post(url).status_code == 200
