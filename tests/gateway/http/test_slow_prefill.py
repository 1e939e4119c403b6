"""A prefill that lasts longer than a client would wait in silence."""

from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.gateway.bodies import SHORT, body, text
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MESSAGES, MODEL
from tests.gateway.serving import API_KEY, eventually

# A busy machine may hold a heartbeat up for seconds: clients that must not give up bear more.
SILENCE_SECONDS = 8.0
SYSTEM = [text("You look things up. " * 300, SHORT)]


@pytest.fixture
def slow(stack: Stack) -> Stack:
    """Prefills for longer than the clients below bear silence, with signs of life."""
    stack.engine.num_heartbeats = int(1.25 * SILENCE_SECONDS / stack.engine.heartbeat_seconds)
    return stack


def impatient(stack: Stack, **changes: Any) -> anthropic.Anthropic:
    timeout = httpx2.Timeout(SILENCE_SECONDS, connect=20)
    settings = {"timeout": timeout, "max_retries": 0, **changes}
    stack.sdks.append(anthropic.Anthropic(base_url=stack.url, api_key=API_KEY, **settings))
    return stack.sdks[-1]


def test_heartbeats_keep_a_stream_alive_in_both_sdks(slow: Stack) -> None:
    with impatient(slow).messages.stream(**body(system=SYSTEM)) as stream:
        message = stream.get_final_message()
    assert message.content[0].text == "Hello there"  # type: ignore[union-attr]
    timeout = httpx2.Timeout(SILENCE_SECONDS, connect=20)
    with openai.OpenAI(
        base_url=f"{slow.url}/v1", api_key=API_KEY, timeout=timeout, max_retries=0
    ) as client:
        chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "Hello there"


def test_a_client_that_gave_up_before_the_first_token_retries_as_if_new(slow: Stack) -> None:
    """The first try is cancelled on the engine and recorded; the second is a whole answer."""
    engine = slow.engine

    def is_second(request: httpx2.Request) -> None:
        if request.headers.get("x-stainless-retry-count") == "1":
            engine.num_heartbeats = 0

    with httpx2.Client(event_hooks={"request": [is_second]}) as http:
        sdk = impatient(slow, max_retries=1, http_client=http)
        message = sdk.messages.create(**body(system=SYSTEM))
    first, second = engine.requests
    assert message.id == second.request_id != first.request_id
    assert message.content[0].text == "Hello there"  # type: ignore[union-attr]
    eventually(lambda: first.request_id in engine.cancelled)
    ids = {first.request_id, second.request_id}

    def rows() -> dict[str, Any]:
        return {t["id"]: t for t in slow.admin("turns").json() if t["id"] in ids}

    eventually(lambda: set(rows()) == ids)
    assert rows()[first.request_id]["outcome"] == "client_disconnect"
    assert rows()[second.request_id]["outcome"] not in ("client_disconnect", None)
