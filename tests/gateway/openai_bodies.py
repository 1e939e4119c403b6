"""What the tests of the OpenAI dialect start from."""

from typing import Any

import openai
import pytest

from engine.protocol import Done, Frame, GenerateRequest, InputUsage
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import Script

MODEL = "holdfast-demo"
LONG_TEXT = "Rules of the house. " * 40
MESSAGES: list[Any] = [{"role": "user", "content": "What is a lease?"}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
EPHEMERAL = {"type": "ephemeral"}


def frames(*steps: Frame, output_tokens: int = 9) -> Script:
    def script(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
        last = Done(request_id=request.request_id, output_tokens=output_tokens)
        return [*steps, last]

    return script


def chat(stack: Stack, **body: Any) -> Any:
    return stack.openai().chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **body})


def refused(stack: Stack, **body: Any) -> dict[str, Any]:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(stack, **body)
    error: dict[str, Any] = caught.value.response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error
