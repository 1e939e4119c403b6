"""`count_tokens` has bounds of its own, and an over-long prompt costs no engine anything."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from gateway.base.bounds import Tuning
from gateway.base.errors import RateLimited
from gateway.limits.counting import Counting
from tests.gateway.bodies import body, text
from tests.gateway.conftest import Stack
from tests.gateway.leaving import asking
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve, serve_gateway

MESSAGES: Any = [{"role": "user", "content": "hi"}]
COUNTED: Any = {"model": "holdfast-demo", "messages": MESSAGES}


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Stack]:
    engine = ScriptedEngine()
    bounds = {"count_requests_per_minute": 5, "count_concurrency": 2}
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url, **bounds) as url:
        stack = Stack(url, engine, tmp_path)
        eventually(stack.is_ready)
        yield stack


def test_counting_has_a_rate_of_its_own(counted: Stack) -> None:
    with counted.sdk() as sdk:
        for _ in range(5):
            assert sdk.messages.count_tokens(**COUNTED).input_tokens > 0
        with pytest.raises(anthropic.RateLimitError, match="5 calls of count_tokens per") as caught:
            sdk.messages.count_tokens(**COUNTED)
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert sdk.messages.create(**COUNTED, max_tokens=1).usage.input_tokens > 0


def test_a_workspace_counts_a_few_at_one_time_and_a_client_that_leaves_ends_its_count(
    counted: Stack,
) -> None:
    counted.engine.count_seconds = 60.0
    path = "/v1/messages/count_tokens"
    with asking(counted.url, path, COUNTED), asking(counted.url, path, COUNTED):
        eventually(lambda: counted.engine.num_counting == 2)
        with counted.http() as http:
            refused = http.post(path, json=COUNTED)
    assert refused.status_code == 429 and "2 concurrent calls" in refused.text
    eventually(lambda: counted.engine.num_counting == 0)
    counted.engine.count_seconds = 0.0
    with counted.http() as http:
        assert http.post("/v1/messages/count_tokens", json=COUNTED).status_code == 200


def test_bytes_are_limited_by_workspace_and_come_back_with_time() -> None:
    now = [0.0]
    counting = Counting(Tuning(count_bytes_per_minute=6000), lambda: now[0])
    with counting.admitted("a", 6000):
        pass
    with pytest.raises(RateLimited, match="6000 bytes in count_tokens per minute") as refused:
        with counting.admitted("a", 100):
            raise AssertionError
    assert refused.value.retry_after == 1
    with counting.admitted("b", 1_000_000):  # longer than the bucket: when that is full
        pass
    now[0] += 1.0
    with counting.admitted("a", 100):
        pass


def test_a_prompt_that_can_not_fit_is_refused_without_the_engine(counted: Stack) -> None:
    counted.engine.longest_token_bytes = 8
    counted.engine.epoch = "epoch-2"
    too_long = [text("word " * 200_000)]  # 1 MB; the context is 100,000 tokens of 8 bytes at most
    request = body(messages=[{"role": "user", "content": too_long}])

    def answer(path: str, **changes: Any) -> httpx.Response:
        with counted.http() as http:
            return http.post(path, json={**request, **changes})

    def is_told() -> bool:
        return answer("/v1/messages").status_code == 400

    eventually(is_told)
    counted.engine.requests.clear()
    asked = counted.engine.num_counts
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"):
        sent = {
            k: v
            for k, v in request.items()
            if path != "/v1/messages/count_tokens" or k != "max_tokens"
        }
        with counted.http() as http:
            refused = http.post(path, json=sent)
        assert refused.status_code == 400, refused.text
        assert "125000 tokens" in refused.text and "100000" in refused.text
    assert not counted.engine.requests and counted.engine.num_counts == asked
    # Blanks may be cut off by a template: they are not counted.
    blank = [text("word" + " " * 1_000_000)]
    assert answer("/v1/messages", messages=[{"role": "user", "content": blank}]).status_code == 200


def test_a_silent_engine_is_not_followed_by_the_next(tmp_path: Path) -> None:
    """What an engine can't cope with must not visit all of them."""
    engines = [ScriptedEngine(is_mute=True), ScriptedEngine(is_mute=True)]
    with (
        serve(engines[0]) as one,
        serve(engines[1]) as two,
        serve_gateway(tmp_path, one, two) as url,
    ):
        stack = Stack(url, engines[0], tmp_path)
        eventually(stack.is_ready)
        with stack.http() as http:
            answer = http.post("/v1/messages", json=body(), timeout=120)
        assert answer.status_code == 529, answer.text
        assert int(answer.headers["retry-after"]) > 0
        assert sum(len(engine.requests) for engine in engines) == 1
