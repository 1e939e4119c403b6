"""Message batches through the official SDK, on a real engine, over a killed gateway."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, BadRequestError, NotFoundError
from anthropic.types.messages import MessageBatch

from scripts.stack import API_HEADERS, API_KEY, serving_engine, serving_gateway
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

ADMIN = "hf-admin-for-tests-00000000000000"
RULES = "Rules of the house: nobody sleeps on the stairs. " * 150
FAST = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "0"}
SLOW = {"ENGINE_SYNTHETIC_PREFILL_US": "0", "ENGINE_SYNTHETIC_DECODE_MS": "40"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("batches")
    with (
        serving_engine("synthetic", FAST) as engine,
        serving_gateway(data, [engine.url]) as gateway,
    ):
        gateway.wait()
        yield gateway.url


def sdk_at(url: str, key: str = API_KEY) -> Anthropic:
    return Anthropic(base_url=url, api_key=key, max_retries=0, timeout=300)


def row(name: str, rules: str, **changes: Any) -> Any:
    marked = {"type": "text", "text": f"{rules}: {RULES}", "cache_control": {"type": "ephemeral"}}
    params = {
        "model": "synthetic",
        "max_tokens": 3,
        "system": [marked],
        "messages": [{"role": "user", "content": f"Question {name}"}],
        **changes,
    }
    return {"custom_id": name, "params": params}


def ended(sdk: Anthropic, batch: MessageBatch) -> MessageBatch:
    eventually(lambda: sdk.messages.batches.retrieve(batch.id).processing_status == "ended")
    return sdk.messages.batches.retrieve(batch.id)


def turns_of(url: str, wanted: set[str]) -> dict[str, Any]:
    found = {turn["id"]: turn for turn in Admin(url, ADMIN).get("turns?limit=100")}
    return {name: found[name] for name in wanted & found.keys()}


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
    ids = {message.id for message in messages}
    eventually(lambda: turns_of(url, ids).keys() == ids)
    turns = turns_of(url, ids)
    for message in messages:
        turn, usage = turns[message.id], message.usage
        assert turn["cache_read_tokens"] == usage.cache_read_input_tokens
        assert turn["cache_write_5m_tokens"] == usage.cache_creation_input_tokens
        assert turn["input_tokens"] == usage.input_tokens
        assert turn["output_tokens"] == usage.output_tokens


def test_a_row_that_can_not_be_read_is_an_error_of_its_own(url: str) -> None:
    with sdk_at(url) as sdk:
        rows = [row("good", "a"), row("bad", "a", max_tokens=-1), row("none", "a", model="no")]
        batch = ended(sdk, sdk.messages.batches.create(requests=rows))
        results = {r.custom_id: r.result for r in sdk.messages.batches.results(batch.id)}
    assert batch.request_counts.errored == 2 and batch.request_counts.succeeded == 1
    assert results["good"].type == "succeeded"
    for name, kind in (("bad", "invalid_request_error"), ("none", "not_found_error")):
        result = results[name]
        assert result.type == "errored"
        assert result.error.error.type == kind


def test_batches_are_listed_found_and_deleted_by_their_workspace_only(url: str) -> None:
    admin = Admin(url, ADMIN)
    admin.workspace("stranger")
    _, key = admin.make_key("stranger")
    with sdk_at(url) as sdk, sdk_at(url, key) as stranger:
        made = [
            ended(sdk, sdk.messages.batches.create(requests=[row("one", "listed")]))
            for _ in range(3)
        ]
        listed = [batch.id for batch in sdk.messages.batches.list(limit=2)]
        assert listed[:3] == [batch.id for batch in reversed(made)]
        assert list(stranger.messages.batches.list()) == []
        with pytest.raises(NotFoundError):
            stranger.messages.batches.retrieve(made[0].id)
        assert sdk.messages.batches.delete(made[0].id).type == "message_batch_deleted"
        with pytest.raises(NotFoundError):
            sdk.messages.batches.retrieve(made[0].id)


@pytest.mark.parametrize(
    "body, field",
    [
        ({}, "body"),
        ({"requests": []}, "requests"),
        ({"requests": [{"custom_id": "a b", "params": {}}]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": "a", "params": {}}] * 2}, "requests.1.custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0]"),
    ],
)
def test_a_batch_that_is_none_is_a_400_that_names_the_field(
    url: str, body: dict[str, Any], field: str
) -> None:
    reply = httpx.post(f"{url}/v1/messages/batches", json=body, headers=API_HEADERS, timeout=120)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"].startswith(field), reply.text


def test_a_batch_survives_a_killed_gateway_and_can_be_cancelled(tmp_path: Path) -> None:
    with serving_engine("synthetic", SLOW) as engine:
        with serving_gateway(tmp_path, [engine.url]) as gateway:
            gateway.wait()
            with sdk_at(gateway.url) as sdk:
                rows = [row(f"r{n}", "kill", max_tokens=10) for n in range(200)]
                batch = sdk.messages.batches.create(requests=rows)

                def counts() -> Any:
                    return sdk.messages.batches.retrieve(batch.id).request_counts

                eventually(lambda: counts().succeeded >= 5)
                with pytest.raises(BadRequestError):
                    sdk.messages.batches.delete(batch.id)
                before = counts().succeeded
            gateway.process.kill()
            gateway.process.wait()
        with serving_gateway(tmp_path, [engine.url]) as gateway:
            gateway.wait()
            with sdk_at(gateway.url) as sdk:
                found = sdk.messages.batches.retrieve(batch.id).request_counts
                assert found.succeeded >= before
                eventually(lambda: counts_of(sdk, batch).succeeded > found.succeeded)
                assert sdk.messages.batches.cancel(batch.id).processing_status == "canceling"
                last = ended(sdk, batch)
                counted = last.request_counts
                assert counted.canceled > 0
                assert counted.canceled + counted.succeeded == 200
                lines = [r.result.type for r in sdk.messages.batches.results(batch.id)]
                assert lines.count("succeeded") == counted.succeeded
                assert lines.count("canceled") == counted.canceled


def counts_of(sdk: Anthropic, batch: MessageBatch) -> Any:
    return sdk.messages.batches.retrieve(batch.id).request_counts


def test_rows_that_have_not_run_in_time_expire(tmp_path: Path) -> None:
    settings = {"HOLDFAST_TUNING": '{"batch_seconds": 1}', "HOLDFAST_BATCH_CONCURRENCY": "1"}
    with (
        serving_engine("synthetic", SLOW) as engine,
        serving_gateway(tmp_path, [engine.url], settings) as gateway,
    ):
        gateway.wait()
        with sdk_at(gateway.url) as sdk:
            rows = [row(f"r{n}", f"late {n}", max_tokens=20) for n in range(300)]
            last = ended(sdk, sdk.messages.batches.create(requests=rows))
            kinds = [r.result.type for r in sdk.messages.batches.results(last.id)]
    assert last.request_counts.expired == kinds.count("expired") > 0
    assert len(kinds) == 300
