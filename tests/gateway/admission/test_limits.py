"""A workspace's limits as the official SDKs meet them. Only the gateway's clock is the tests'."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from engine.protocol import ErrorReply
from gateway.app import create_app
from gateway.base.clock import Clock
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import SHORT, body, text
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, make_settings, serve, serve_app, serve_gateway
from tests.migrated import migrate

# Noon of a day in the middle of a month, so that no test meets a month's end.
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@dataclass
class Standing:
    """A clock that stands still until a test moves it."""

    seconds: float = 1000.0

    def clock(self) -> Clock:
        return Clock(
            wall=lambda: NOON + timedelta(seconds=self.seconds), monotonic=lambda: self.seconds
        )


@dataclass
class Limited:
    stack: Stack
    time: Standing
    admin: Admin
    keys: dict[str, str] = field(default_factory=dict)

    def workspace(self, name: str, **limits: Any) -> None:
        self.admin.workspace(name, **limits)
        self.keys[name] = self.admin.make_key(name)[1]

    def sdk(self, workspace: str) -> anthropic.Anthropic:
        return self.stack.sdk(self.keys[workspace])

    def openai(self, workspace: str) -> openai.OpenAI:
        return self.stack.openai(self.keys[workspace])

    def http(self, workspace: str) -> httpx.Client:
        return self.stack.http(self.keys[workspace])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    data = tmp_path_factory.mktemp("limits")
    engine = ScriptedEngine()
    time = Standing()
    with serve(engine) as engine_url:
        settings = make_settings(data, engine_url)
        migrate(settings)
        with serve_app(create_app(settings, clock=time.clock()), settings) as url:
            yield Limited(Stack(url, engine, data), time, Admin(url))


@pytest.fixture
def limited(served: Limited) -> Iterator[Limited]:
    eventually(served.stack.is_ready)
    served.stack.engine.wait_seconds = 0.0
    yield served
    served.stack.close()


def test_the_sdk_raises_its_rate_limit_error_and_is_told_when_to_retry(limited: Limited) -> None:
    limited.workspace("requests", requests_per_minute=2)
    sdk = limited.sdk("requests")
    for remaining in ("1", "0"):
        raw = sdk.messages.with_raw_response.create(**body())
        assert raw.headers["anthropic-ratelimit-requests-limit"] == "2"
        assert raw.headers["anthropic-ratelimit-requests-remaining"] == remaining
    with pytest.raises(anthropic.RateLimitError) as refused:
        sdk.messages.create(**body())
    headers = refused.value.response.headers
    assert refused.value.type == "rate_limit_error"
    assert headers["retry-after"] == "30"
    reset = datetime.fromisoformat(headers["anthropic-ratelimit-requests-reset"])
    assert reset == NOON + timedelta(seconds=limited.time.seconds + 60)
    assert not [name for name in headers if "-tokens-" in name], "there is no limit of tokens"
    limited.time.seconds += 30
    sdk.messages.create(**body())


def test_the_sdk_waits_and_then_gets_its_answer(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK's own retries: time passes on our clock as long as it sleeps."""
    limited.workspace("patient", requests_per_minute=1)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        limited.time.seconds += seconds

    monkeypatch.setattr(anthropic._base_client.time, "sleep", sleep)
    sdk = limited.sdk("patient").with_options(max_retries=1)
    sdk.messages.create(**body())
    assert sdk.messages.create(**body()).content
    assert slept == [60.0]


def test_openais_sdk_meets_the_same_limit_in_its_own_words(limited: Limited) -> None:
    limited.workspace("openai", requests_per_minute=1, tokens_per_minute=6000)
    sdk = limited.openai("openai")
    raw = sdk.chat.completions.with_raw_response.create(model="holdfast-demo", messages=MESSAGES)
    assert raw.headers["x-ratelimit-limit-requests"] == "1"
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"
    assert raw.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert raw.headers["x-ratelimit-limit-tokens"] == "6000"
    assert not [name for name in raw.headers if name.startswith("anthropic-ratelimit")]
    with pytest.raises(openai.RateLimitError) as refused:
        sdk.chat.completions.create(model="holdfast-demo", messages=MESSAGES)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "60"
    with pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="holdfast-demo", prompt="Once")


def test_tokens_are_settled_with_the_engines_counts_and_reads_are_free(limited: Limited) -> None:
    limited.workspace("tokens", tokens_per_minute=1_000_000)
    sdk = limited.sdk("tokens")
    request = body(system=[text("You look things up. " * 400, SHORT)])
    counted = 0
    for number in range(4):
        usage = sdk.messages.create(**request).usage
        assert (usage.cache_read_input_tokens or 0) > 1000 or number == 0
        counted += usage.input_tokens + (usage.cache_creation_input_tokens or 0)
        counted += usage.output_tokens
    # A request that is refused before it starts reserves nothing.
    with limited.http("tokens") as http:
        headers = http.post("/v1/messages", json=body(max_tokens=-1)).headers
    for kind in ("tokens", "input-tokens", "output-tokens"):
        assert headers[f"anthropic-ratelimit-{kind}-remaining"] == str(1_000_000 - counted)


def test_concurrency_is_bounded_and_a_client_that_goes_away_frees_what_it_took(
    limited: Limited,
) -> None:
    limited.workspace("concurrent", max_concurrency=1, tokens_per_minute=1_000_000)
    limited.stack.engine.wait_seconds = 60.0
    sdk = limited.sdk("concurrent")
    with limited.http("concurrent") as http:

        def remaining() -> int:
            headers = http.post("/v1/messages", json=body(max_tokens=-1)).headers
            return int(headers["anthropic-ratelimit-tokens-remaining"])

        with http.stream("POST", "/v1/messages", json=body(stream=True)) as reply:
            assert reply.status_code == 200
            tokens_left = int(reply.headers["anthropic-ratelimit-tokens-remaining"])
            assert tokens_left < 1_000_000
            with pytest.raises(anthropic.RateLimitError, match="1 concurrent") as refused:
                sdk.messages.create(**body())
            assert refused.value.response.headers["retry-after"] == "1"
        eventually(lambda: remaining() > tokens_left)
        limited.stack.engine.wait_seconds = 0.0
        eventually(lambda: http.post("/v1/messages", json=body()).status_code == 200)


def test_a_spend_limit_is_a_billing_error_and_openais_insufficient_quota(limited: Limited) -> None:
    """No turn begins that could pass the limit, also the first one."""
    limited.workspace("spending", monthly_spend_nano=1)
    sdk = limited.sdk("spending")
    with pytest.raises(anthropic.APIStatusError) as refused:
        sdk.messages.create(**body())
    assert (refused.value.status_code, refused.value.type) == (402, "billing_error")
    assert "would exceed the workspace's spend limit of $0.000000001" in refused.value.message
    assert "retry-after" not in refused.value.response.headers
    with pytest.raises(openai.RateLimitError) as quota:
        limited.openai("spending").chat.completions.create(model="holdfast-demo", messages=MESSAGES)
    assert (quota.value.code, quota.value.type) == ("insufficient_quota", "insufficient_quota")
    assert quota.value.response.headers["x-should-retry"] == "false"
    limited.admin.post("workspaces/spending", {"monthly_spend_nano": 10**9})
    with limited.http("spending") as http:
        eventually(lambda: http.post("/v1/messages", json=body()).status_code == 200)


def test_a_refused_turn_leaves_no_row_and_reaches_no_engine(limited: Limited) -> None:
    limited.workspace("refused", requests_per_minute=1)
    with limited.http("refused") as http:
        assert http.post("/v1/messages", json=body()).status_code == 200
        count = len(limited.stack.engine.requests)
        for _ in range(5):
            assert http.post("/v1/messages", json=body()).status_code == 429
    assert len(limited.stack.engine.requests) == count
    limited.workspace("later")
    limited.sdk("later").messages.create(**body())
    turns: list[Any] = []

    def is_drained() -> bool:
        turns[:] = limited.admin.get("turns?limit=1000")
        return "later" in [turn["workspace"] for turn in turns]

    eventually(is_drained)
    assert [turn["outcome"] for turn in turns if turn["workspace"] == "refused"] == ["stop"]


def test_limits_tell_nothing_of_other_workspaces(limited: Limited) -> None:
    for name in ("one", "two"):
        limited.workspace(name, requests_per_minute=10, tokens_per_minute=100_000)

    def headers(workspace: str) -> dict[str, str]:
        with limited.http(workspace) as http:
            by_name = http.post("/v1/messages", json=body(max_tokens=-1)).headers
        return {name: value for name, value in by_name.items() if "ratelimit" in name}

    before = headers("two")
    assert len(before) == 12
    for _ in range(5):
        limited.sdk("one").messages.create(**body())
    assert headers("two") == before
    assert headers("one") != before


def test_a_changed_limit_counts_at_once_and_keeps_what_was_used(limited: Limited) -> None:
    limited.workspace("changing", requests_per_minute=1)
    sdk = limited.sdk("changing")
    sdk.messages.create(**body())
    limited.admin.post("workspaces/changing", {"requests_per_minute": 2})
    sdk.messages.create(**body())
    with pytest.raises(anthropic.RateLimitError):
        sdk.messages.create(**body())
    limited.admin.post("workspaces/changing", {"requests_per_minute": None})
    raw = sdk.messages.with_raw_response.create(**body())
    assert not [name for name in raw.headers if "ratelimit" in name]


def test_many_at_once_never_get_more_than_the_limit(limited: Limited) -> None:
    limited.workspace("crowd", requests_per_minute=7)
    with limited.http("crowd") as http, ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(http.post, "/v1/messages", json=body()) for _ in range(20)]
        statuses = sorted(reply.result().status_code for reply in futures)
    assert statuses == [200] * 7 + [429] * 13


def is_out_of_money(stack: Stack, key: str) -> Callable[[], bool]:
    """The engine refuses meanwhile, so that asking costs nothing."""

    def ask() -> bool:
        with stack.http(key) as http:
            reply = http.post("/v1/messages", json=body())
        assert reply.status_code in (402, 529), reply.text
        return reply.status_code == 402

    eventually(stack.is_ready)
    return ask


def test_spend_outlives_a_restart_and_is_shared_through_the_ledger(
    tmp_path: Path, shared_database: str
) -> None:
    engine = ScriptedEngine()
    changes = {"database_url": shared_database, "queue_seconds": 0.0}
    with serve(engine) as engine_url:
        with serve_gateway(tmp_path / "a", engine_url, **changes) as first:
            stack = Stack(first, engine, tmp_path)
            admin = Admin(first)
            eventually(stack.is_ready)
            admin.workspace("w")
            key = admin.make_key("w")[1]
            with stack.http(key) as http:
                for _ in range(3):
                    assert http.post("/v1/messages", json=body()).status_code == 200
            eventually(lambda: admin.get("workspaces/w")["spent_nano"] > 0)
            with serve_gateway(tmp_path / "b", engine_url, **changes) as second:
                engine.refusal = ErrorReply("overloaded", "full")
                admin.post("workspaces/w", {"monthly_spend_nano": 1})
                eventually(is_out_of_money(Stack(second, engine, tmp_path), key))
        with serve_gateway(tmp_path / "a", engine_url, **changes) as again:
            eventually(is_out_of_money(Stack(again, engine, tmp_path), key))
