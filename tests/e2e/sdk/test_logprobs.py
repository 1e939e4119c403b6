"""Log-probabilities in three dialects, read by the official SDKs, streamed and not."""

import math
from typing import Any

from google.genai import types
from openai import OpenAI

from scripts.stack import Stack
from tests.e2e.prompts import MODEL
from tests.e2e.test_cached_contents import sdk_at

QUESTION: Any = {"role": "user", "content": "What is a lease?"}
ASKED: Any = {"model": MODEL, "messages": [QUESTION], "max_tokens": 12, "temperature": 0}
WITH: Any = {**ASKED, "logprobs": True, "top_logprobs": 3}


def spelled(tokens: Any) -> str:
    return b"".join(bytes(token.bytes) for token in tokens).decode().strip()


def test_chat_tells_them_of_each_token_of_the_text(openai: OpenAI) -> None:
    plain = openai.chat.completions.create(**ASKED)
    whole = openai.chat.completions.create(**WITH)
    assert plain.choices[0].logprobs is None
    [choice] = whole.choices
    assert choice.logprobs is not None and choice.logprobs.content
    text = choice.message.content
    assert text == plain.choices[0].message.content
    assert spelled(choice.logprobs.content) == (text or "").strip()
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert (token.token, token.logprob) == (
            token.top_logprobs[0].token,
            token.top_logprobs[0].logprob,
        )
        assert sum(math.exp(likely.logprob) for likely in token.top_logprobs) <= 1 + 1e-4


def test_a_chats_stream_has_the_same_as_its_whole_answer(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**WITH, n=2, seed=1).choices
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in openai.chat.completions.create(**WITH, n=2, seed=1, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                assert choice.delta.content
                streamed[choice.index] += choice.logprobs.content or []
    for choice in whole:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert [token.token for token in streamed[choice.index]] == [
            token.token for token in tokens
        ]


def test_responses_tell_them_in_events_and_items(openai: OpenAI) -> None:
    request: Any = {
        "model": MODEL,
        "input": "What is a lease?",
        "temperature": 0,
        "max_output_tokens": 12,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = openai.responses.create(**request)
    [part] = [part for item in whole.output for part in item.content]  # type: ignore[union-attr]
    assert whole.top_logprobs == 2 and "ignored" not in whole.model_extra["holdfast"]  # type: ignore[index]
    assert spelled(part.logprobs) == part.text.strip()
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    events = list(openai.responses.create(**request, stream=True))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    [end_event] = [e for e in events if e.type == "response.output_text.done"]
    chosen = [token.token for event in deltas for token in event.logprobs]
    assert (
        chosen
        == [token.token for token in part.logprobs]
        == [token.token for token in end_event.logprobs]
    )


def test_gemini_tells_them_of_each_candidate(stack: Stack) -> None:
    config = types.GenerateContentConfig(
        temperature=0, max_output_tokens=12, response_logprobs=True, logprobs=2
    )
    request: Any = {"model": MODEL, "contents": "What is a lease?", "config": config}
    with sdk_at(stack.gateway) as google:
        [candidate] = google.models.generate_content(**request).candidates or []
        chunks = list(google.models.generate_content_stream(**request))
    result = candidate.logprobs_result
    assert result is not None and result.chosen_candidates and result.top_candidates
    chosen = [token.token for token in result.chosen_candidates]
    assert candidate.content is not None and candidate.content.parts is not None
    assert "".join(map(str, chosen)).strip() == (candidate.content.parts[0].text or "").strip()
    assert all(len(step.candidates or []) == 2 for step in result.top_candidates)
    results = [
        candidate.logprobs_result for chunk in chunks for candidate in chunk.candidates or []
    ]
    assert [
        t.token for result in results if result for t in result.chosen_candidates or []
    ] == chosen
