"""llm with llm-anthropic, unmodified. They need an older SDK than the other clients."""

from itertools import count

import pytest

from tests.clients.conversation import (
    ABOUT_WEATHER,
    MAX_TOKENS,
    MODEL,
    QUESTIONS,
    Service,
    Turn,
    assert_append_only,
    get_weather,
    handbook,
)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_llm_anthropic(service: Service, is_streamed: bool) -> None:
    import llm
    from llm_anthropic import ClaudeMessages

    numbers = count(1)

    def weather(city: str) -> str:
        return f"{get_weather(city)}, says station {next(numbers)}"

    model = ClaudeMessages(MODEL, base_url=service.url)
    model.key = service.key
    tool = llm.Tool.function(weather, name="get_weather")
    tool.description = ABOUT_WEATHER
    conversation = model.conversation(tools=[tool])
    system = handbook()
    for question in QUESTIONS:
        conversation.chain(
            question,
            system=system,
            stream=is_streamed,
            options={"cache": True, "temperature": 0, "max_tokens": MAX_TOKENS},
        ).text()
    turns = []
    for response in conversation.responses:
        usage = response.usage()
        read_tokens = usage.details["cache_read_input_tokens"]
        written_tokens = usage.details["cache_creation_input_tokens"]
        turns.append(Turn(usage.input + read_tokens + written_tokens, read_tokens, written_tokens))
    assert_append_only(turns)
