"""Message batches through the official SDK, on a real engine, over a killed gateway."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, BadRequestError, NotFoundError, RateLimitError
from anthropic.types.messages import MessageBatch

from scripts.bench.load import body_of
from scripts.stack import API_HEADERS, API_KEY, serving_engine, serving_gateway
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

RULES = "Rules of the house: nobody sleeps on the stairs. " * 150


def engine_of(decode_ms: int) -> Iterator[str]:
    settings = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": str(decode_ms)}
    with serving_engine("synthetic", settings) as engine:
        yield engine.wait().url


@pytest.fixture(scope="module")
def fast() -> Iterator[str]:
    yield from engine_of(0)


@pytest.fixture(scope="module")
def slow() -> Iterator[str]:
    yield from engine_of(40)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, fast: str) -> Iterator[str]:
    with serving_gateway(tmp_path_factory.mktemp("batches"), [fast]) as gateway:
        yield gateway.wait().url


def sdk_at(url: str, key: str = API_KEY) -> Anthropic:
    return Anthropic(base_url=url, api_key=key, max_retries=0, timeout=300)


def row(name: str, rules: str, **changes: Any) -> Any:
    params = body_of("synthetic", f"{rules}: {RULES}", f"Question {name}", max_tokens=3)
    return {"custom_id": name, "params": params | changes}


def ended(sdk: Anthropic, batch: MessageBatch) -> MessageBatch:
    eventually(lambda: sdk.messages.batches.retrieve(batch.id).processing_status == "ended")
    return sdk.messages.batches.retrieve(batch.id)


def test_rows_of_one_prefix_run_together_and_are_billed_each(url: str) -> None:
    with sdk_at(url) as sdk:
        rows = [row(f"r{number}", f"house {number % 3}") for number in range(24)]
        batch = sdk.messages.batches.create(requests=rows)
        assert batch.request_counts.processing == 24 and batch.results_url is None
        batch = ended(sdk, batch)
        assert (batch.request_counts.succeeded, batch.request_counts.processing) == (24, 0)
        results = list(sdk.messages.batches.results(batch.id))
    assert [result.custom_id for result in results] == [f"r{number}" for number in range(24)]
    messages = [r.result.message for r in results if r.result.type == "succeeded"]
    assert len(messages) == 24
    writers = [m for m in messages if not m.usage.cache_read_input_tokens]
    assert len(writers) == 3, "the first row of a prefix writes what all others read"
    for message in messages:
        turn = Admin(url).recorded(message.id)
        usage = message.usage
        assert turn["cache_read_tokens"] == usage.cache_read_input_tokens
        assert turn["cache_write_5m_tokens"] == usage.cache_creation_input_tokens
        assert turn["input_tokens"] == usage.input_tokens
        assert turn["output_tokens"] == usage.output_tokens


def test_a_row_that_can_not_be_read_is_an_error_of_its_own(url: str) -> None:
    with sdk_at(url) as sdk:
        rows = [row("good", "a"), row("bad", "a", max_tokens=-1), row("none", "a", model="no")]
        rows.append(row("empty", "a", max_tokens=0))
        batch = ended(sdk, sdk.messages.batches.create(requests=rows))
        results = {r.custom_id: r.result for r in sdk.messages.batches.results(batch.id)}
    assert batch.request_counts.errored == 3 and batch.request_counts.succeeded == 1
    assert results["good"].type == "succeeded"
    kinds = dict.fromkeys(("bad", "empty"), "invalid_request_error") | {"none": "not_found_error"}
    for name, kind in kinds.items():
        result = results[name]
        assert result.type == "errored"
        assert result.error.error.type == kind


def test_batches_are_listed_found_and_deleted_by_their_workspace_only(url: str) -> None:
    admin = Admin(url)
    admin.workspace("stranger")
    _, key = admin.make_key("stranger")
    with sdk_at(url) as sdk, sdk_at(url, key) as stranger:
        batches = [
            ended(sdk, sdk.messages.batches.create(requests=[row("one", "listed")]))
            for _ in range(3)
        ]
        listed = [batch.id for batch in sdk.messages.batches.list(limit=2)]
        assert listed[:3] == [batch.id for batch in reversed(batches)]
        assert list(stranger.messages.batches.list()) == []
        with pytest.raises(NotFoundError):
            stranger.messages.batches.retrieve(batches[0].id)
        assert sdk.messages.batches.delete(batches[0].id).type == "message_batch_deleted"
        with pytest.raises(NotFoundError):
            sdk.messages.batches.retrieve(batches[0].id)


def test_a_batch_that_is_none_is_a_400_that_names_the_field(url: str) -> None:
    row = {"custom_id": "a", "params": {}}
    for body, field in (
        ({}, "body"),
        ({"requests": []}, "requests"),
        ({"requests": [{**row, "custom_id": "a b"}]}, "requests.0.custom_id"),
        ({"requests": [row] * 2}, "requests.1.custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0]"),
    ):
        path = f"{url}/v1/messages/batches"
        reply = httpx.post(path, json=body, headers=API_HEADERS, timeout=120)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"].startswith(field), reply.text


def test_a_batch_survives_a_killed_gateway_and_can_be_cancelled(tmp_path: Path, slow: str) -> None:
    with serving_gateway(tmp_path, [slow]) as gateway:
        with sdk_at(gateway.wait().url) as sdk:
            rows = [row(f"r{n}", "kill", max_tokens=10) for n in range(150)]
            batch = sdk.messages.batches.create(requests=rows)
            eventually(lambda: counts_of(sdk, batch).succeeded >= 5)
            with pytest.raises(BadRequestError):
                sdk.messages.batches.delete(batch.id)
            before = counts_of(sdk, batch).succeeded
        gateway.process.kill()
        gateway.process.wait()
    with serving_gateway(tmp_path, [slow]) as gateway, sdk_at(gateway.wait().url) as sdk:
        counts = counts_of(sdk, batch)
        assert counts.succeeded >= before
        eventually(lambda: counts_of(sdk, batch).succeeded > counts.succeeded)
        assert sdk.messages.batches.cancel(batch.id).processing_status == "canceling"
        counted = ended(sdk, batch).request_counts
        assert counted.canceled > 0
        assert counted.canceled + counted.succeeded == 150
        lines = [r.result.type for r in sdk.messages.batches.results(batch.id)]
        assert lines.count("succeeded") == counted.succeeded
        assert lines.count("canceled") == counted.canceled


def counts_of(sdk: Anthropic, batch: MessageBatch) -> Any:
    return sdk.messages.batches.retrieve(batch.id).request_counts


def test_rows_that_have_not_run_in_time_expire(tmp_path: Path, slow: str) -> None:
    settings = {"HOLDFAST_TUNING": '{"batch_seconds": 1}', "HOLDFAST_BATCH_CONCURRENCY": "1"}
    with (
        serving_gateway(tmp_path, [slow], settings) as gateway,
        sdk_at(gateway.wait().url) as sdk,
    ):
        rows = [row(f"r{n}", f"late {n}", max_tokens=20) for n in range(80)]
        last = ended(sdk, sdk.messages.batches.create(requests=rows))
        kinds = [r.result.type for r in sdk.messages.batches.results(last.id)]
    assert last.request_counts.expired == kinds.count("expired") > 0
    assert len(kinds) == 80


def test_rows_that_have_to_wait_keep_no_other_workspace_out(tmp_path: Path, fast: str) -> None:
    """One workspace's rows run at five a minute, so its batches last longer than this test."""
    settings = {"HOLDFAST_BATCH_CONCURRENCY": "2"}
    with serving_gateway(tmp_path, [fast], settings) as gateway:
        admin = Admin(gateway.wait().url)
        admin.workspace("limited", requests_per_minute=5)
        admin.workspace("free")
        keys = [admin.make_key(workspace)[1] for workspace in ("limited", "free")]
        with sdk_at(gateway.url, keys[0]) as limited, sdk_at(gateway.url, keys[1]) as free:
            many = [row(f"r{number}", f"limited {number % 3}") for number in range(100)]
            first, *_ = [limited.messages.batches.create(requests=many) for _ in range(3)]
            eventually(lambda: counts_of(limited, first).succeeded >= 2)
            few = [row(f"r{number}", "free") for number in range(20)]
            last = ended(free, free.messages.batches.create(requests=few))
            assert last.request_counts.succeeded == 20
            assert counts_of(limited, first).processing > 0
            # The workspace's rows wait for its limit, and none is an error.
            assert counts_of(limited, first).errored == 0


def test_a_batch_too_many_is_refused_in_words_until_another_ends(tmp_path: Path, slow: str) -> None:
    with (
        serving_gateway(tmp_path, [slow], {"HOLDFAST_TUNING": '{"batches": 3}'}) as gateway,
        sdk_at(gateway.wait().url) as sdk,
    ):
        rows = [row(f"r{number}", "many", max_tokens=50) for number in range(100)]
        batches = [sdk.messages.batches.create(requests=rows) for _ in range(3)]
        with pytest.raises(RateLimitError, match="limit of 3 batches that have not ended"):
            sdk.messages.batches.create(requests=rows)
        # The third waits for the two others, and yet ends at once when it is cancelled.
        sdk.messages.batches.cancel(batches[2].id)
        assert ended(sdk, batches[2]).request_counts.canceled == 100
        assert counts_of(sdk, batches[0]).processing > 0
        sdk.messages.batches.create(requests=rows)
