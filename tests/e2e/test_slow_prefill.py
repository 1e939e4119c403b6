"""Prefills of a real minute, behind clients that give up after 20 s of silence.

Both SDKs stream; a third client that does not stream waits with the SDK's own timeout, which is ten
minutes. A short version is in `tests/gateway/http/test_slow_prefill.py`.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from openai import OpenAI

from scripts.stack import API_KEY, Stack, running_stack
from tests.e2e.prompts import handbook, marked

MODEL = "synthetic"
QUESTION: list[Any] = [{"role": "user", "content": "What is a lease?"}]
SILENCE_SECONDS = 20
TIMEOUT = httpx2.Timeout(SILENCE_SECONDS, connect=20)
# A prompt has some 1,400 tokens, so three of them are computed in about 84 s.
PREFILL_US = 20_000


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"ENGINE_SYNTHETIC_PREFILL_US": str(PREFILL_US)}
    data = tmp_path_factory.mktemp("slow")
    with running_stack(data, backend="synthetic", engine_settings=settings) as running:
        yield running


def wait(slow: Stack) -> int:
    with Anthropic(base_url=slow.gateway, api_key=API_KEY, max_retries=0, timeout=120) as client:
        message = client.messages.create(
            model=MODEL, max_tokens=2, messages=QUESTION, system=handbook(100)
        )
    return message.usage.output_tokens


def stream(slow: Stack) -> int:
    system: Any = marked(handbook(100))
    with (
        Anthropic(base_url=slow.gateway, api_key=API_KEY, timeout=TIMEOUT, max_retries=0) as client,
        client.messages.stream(
            model=MODEL, max_tokens=2, messages=QUESTION, system=system
        ) as events,
    ):
        return events.get_final_message().usage.output_tokens


def chat(slow: Stack) -> int:
    url = f"{slow.gateway}/v1"
    system: Any = {"role": "system", "content": handbook(100)}
    with OpenAI(base_url=url, api_key=API_KEY, timeout=TIMEOUT, max_retries=0) as client:
        *_, last = client.chat.completions.create(
            model=MODEL,
            max_tokens=2,
            messages=[system, *QUESTION],
            stream=True,
            stream_options={"include_usage": True},
        )
    assert last.usage is not None
    return last.usage.completion_tokens


@pytest.mark.slow
def test_a_prefill_of_a_minute_times_nobody_out(slow: Stack) -> None:
    began = time.monotonic()

    def timed(call: Any) -> tuple[int, float]:
        return call(slow), time.monotonic() - began

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(timed, (wait, stream, chat)))
    assert [tokens for tokens, _ in done] == [2, 2, 2]
    waits = [seconds for _, seconds in done]
    assert max(waits) > 60 and max(waits[1:]) > 2 * SILENCE_SECONDS
    print(f"answers after {', '.join(f'{seconds:.0f} s' for seconds in waits)}")
