"""LangChain, Pydantic AI and instructor, unmodified, each with its own way to cache."""

import asyncio
from typing import Any

import pytest

from tests.clients.conversation import (
    ANTHROPIC_TOOL,
    EPHEMERAL,
    MAX_TOKENS,
    MODEL,
    QUESTIONS,
    Service,
    Turn,
    assert_append_only,
    get_weather,
    handbook,
)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["invoke", "stream"])
@pytest.mark.parametrize("caching", ["blocks", "automatic"])
def test_langchain_anthropic(service: Service, caching: str, is_streamed: bool) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    options: dict[str, Any] = {"cache_control": EPHEMERAL} if caching == "automatic" else {}
    model = ChatAnthropic(
        model=MODEL,
        base_url=service.url,
        api_key=service.key,
        max_tokens=MAX_TOKENS,
    ).bind_tools([ANTHROPIC_TOOL], tool_choice="auto", **options)

    def marked(text: str) -> Any:
        if caching == "automatic":
            return text
        return [{"type": "text", "text": text, "cache_control": EPHEMERAL}]

    def ask() -> Any:
        if not is_streamed:
            return model.invoke(messages)
        chunks = iter(model.stream(messages))
        whole = next(chunks)
        for chunk in chunks:
            whole += chunk
        return whole

    messages: list[Any] = [SystemMessage(marked(handbook()))]
    turns: list[Turn] = []
    for question in QUESTIONS:
        messages.append(HumanMessage(marked(question)))
        answer = ask()
        turns.append(langchain_turn(answer.usage_metadata))
        messages.append(answer)
        for call in answer.tool_calls:
            result = get_weather(**call["args"])
            messages.append(ToolMessage(marked(result), tool_call_id=call["id"]))
        if answer.tool_calls:
            messages.append(ask())
            turns.append(langchain_turn(messages[-1].usage_metadata))
        # Only the four latest markers may stand; LangChain leaves that to its user.
        for message in messages[1:-3]:
            unmark(message)
    assert_append_only(turns)


def unmark(message: Any) -> None:
    if isinstance(message.content, list):
        for part in message.content:
            part.pop("cache_control", None)


def langchain_turn(usage: Any) -> Turn:
    details = usage["input_token_details"]
    # One or the other, so that their sum counts nothing twice.
    written_tokens = details["cache_creation"] + details.get("ephemeral_5m_input_tokens", 0)
    return Turn(usage["input_tokens"], details["cache_read"], written_tokens)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["run", "stream"])
@pytest.mark.parametrize("caching", ["anthropic_cache", "anthropic_cache_messages"])
def test_pydantic_ai(service: Service, caching: str, is_streamed: bool) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
    from pydantic_ai.providers.anthropic import AnthropicProvider

    settings: Any = AnthropicModelSettings(
        max_tokens=MAX_TOKENS,
        anthropic_cache_instructions=True,
        anthropic_cache_tool_definitions=True,
        anthropic_cache_diagnostics=True,
    )
    settings[caching] = True

    async def talk() -> list[Any]:
        provider = AnthropicProvider(base_url=service.url, api_key=service.key)
        agent = Agent(
            AnthropicModel(MODEL, provider=provider),
            instructions=handbook(),
            model_settings=settings,
        )
        agent.tool_plain(get_weather)
        history: list[Any] = []
        for question in QUESTIONS:
            if is_streamed:
                async with agent.run_stream(question, message_history=history) as stream:
                    await stream.get_output()
                history = stream.all_messages()
            else:
                history = (await agent.run(question, message_history=history)).all_messages()
        return history

    history = asyncio.run(talk())
    responses = [message for message in history if isinstance(message, ModelResponse)]
    assert_append_only(
        [
            Turn(r.usage.input_tokens, r.usage.cache_read_tokens, r.usage.cache_write_tokens)
            for r in responses
        ]
    )
    # Each turn was compared with the one before it, and nothing had changed.
    assert not any("cache_diagnostics" in (r.provider_details or {}) for r in responses)


def test_instructor(service: Service) -> None:
    """Structured output by a forced tool; the tool's answer becomes a message, as text."""
    import instructor
    from anthropic import Anthropic
    from pydantic import BaseModel, ConfigDict, Field

    class Opinion(BaseModel):
        """What the answer to a question is about."""

        # Without it the schema has no bound, and so small a model goes on inventing properties.
        model_config = ConfigDict(extra="forbid")
        is_about_memory: bool
        score: int = Field(ge=0, le=9)

    client = instructor.from_anthropic(
        Anthropic(base_url=service.url, api_key=service.key, timeout=120)
    )
    system = [{"type": "text", "text": handbook(), "cache_control": EPHEMERAL}]
    messages: list[Any] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        opinion, raw = client.messages.create_with_completion(
            model=MODEL,
            max_tokens=MAX_TOKENS,
            system=system,
            messages=messages,
            response_model=Opinion,
            cache_control=EPHEMERAL,
        )
        assert 0 <= opinion.score <= 9
        turns.append(anthropic_turn(raw.usage))
        messages.append({"role": "assistant", "content": opinion.model_dump_json()})
    assert_append_only(turns)


def anthropic_turn(usage: Any) -> Turn:
    read_tokens = usage.cache_read_input_tokens
    written_tokens = usage.cache_creation_input_tokens
    return Turn(usage.input_tokens + read_tokens + written_tokens, read_tokens, written_tokens)
