"""LiteLLM, unmodified, through both of its providers that can speak to the gateway."""

import json
from typing import Any

import pytest

from tests.clients.conversation import (
    EPHEMERAL,
    MAX_SCAFFOLD,
    MAX_TOKENS,
    MIN_CACHED,
    MIN_TURNS,
    MODEL,
    OPENAI_TOOL,
    QUESTIONS,
    Service,
    Turn,
    assert_append_only,
    get_weather,
    handbook,
)


def marked(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": EPHEMERAL}]


def ask(target: dict[str, str], messages: list[Any], *, is_streamed: bool) -> Any:
    import litellm

    body: dict[str, Any] = {"messages": messages, "tools": [OPENAI_TOOL], "tool_choice": "auto"}
    body |= {"max_tokens": MAX_TOKENS, **target}
    if not is_streamed:
        return litellm.completion(**body)
    chunks = litellm.completion(stream=True, stream_options={"include_usage": True}, **body)
    return litellm.stream_chunk_builder(list(chunks), messages=messages)


def talk(target: dict[str, str], *, is_streamed: bool) -> list[Any]:
    """All responses of one conversation; system prompt and latest user message are marked."""
    messages: list[Any] = [{"role": "system", "content": marked(handbook())}]
    responses = []
    for question in QUESTIONS:
        for message in messages[1:]:
            unmark(message)
        messages.append({"role": "user", "content": marked(question)})
        responses.append(ask(target, messages, is_streamed=is_streamed))
        answer = responses[-1].choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            result = get_weather(**json.loads(call.function.arguments))
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result,
                 "cache_control": EPHEMERAL}
            )  # fmt: skip
        if answer.tool_calls:
            responses.append(ask(target, messages, is_streamed=is_streamed))
            messages.append(responses[-1].choices[0].message.model_dump(exclude_none=True))
    return responses


def unmark(message: Any) -> None:
    message.pop("cache_control", None)
    if isinstance(message.get("content"), list):
        for part in message["content"]:
            part.pop("cache_control", None)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_through_the_anthropic_provider(service: Service, is_streamed: bool) -> None:
    target = {"model": f"anthropic/{MODEL}", "api_base": service.url, "api_key": service.key}
    usages = [response.usage for response in talk(target, is_streamed=is_streamed)]
    assert_append_only(
        [
            Turn(u.prompt_tokens, u.cache_read_input_tokens, u.cache_creation_input_tokens)
            for u in usages
        ]
    )


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_through_the_openai_provider(service: Service, is_streamed: bool) -> None:
    """`cached_tokens` is all that came out of memory; written and cached never overlap."""
    target = {"model": f"openai/{MODEL}", "api_base": f"{service.url}/v1", "api_key": service.key}
    responses = talk(target, is_streamed=is_streamed)
    details = [response.usage.prompt_tokens_details for response in responses]
    in_cache = [d.cached_tokens + d.cache_write_tokens for d in details]
    assert len(responses) >= MIN_TURNS
    assert details[0].cache_write_tokens >= MIN_CACHED
    for response, tokens in zip(responses, in_cache, strict=True):
        assert 0 < response.usage.prompt_tokens - tokens <= MAX_SCAFFOLD
    for before, detail in zip(in_cache, details[1:], strict=False):
        # All that was there is reused, and at most the answer besides, which came back.
        assert before <= detail.cached_tokens <= before + MAX_TOKENS
    if not is_streamed:  # LiteLLM joins the chunks of a stream without fields that it doesn't know
        assert_append_only([exact(response) for response in responses])


def exact(response: Any) -> Turn:
    """What was read of entries and written to them, told from what merely happened to be there."""
    cached = response.usage.prompt_tokens_details.cached_tokens
    read_tokens = cached - response.holdfast["automatic_tokens"]
    return Turn(response.usage.prompt_tokens, read_tokens, response.holdfast["written_tokens"])
