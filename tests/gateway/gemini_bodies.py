"""What the tests of Google's dialect start from."""

from typing import Any

from google import genai
from google.genai import types

from tests.gateway.conftest import Stack
from tests.gateway.serving import API_KEY

MODEL = "holdfast-demo"
LONG_TEXT = "Rules of the house. " * 40
QUESTION = "What is a lease?"
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "OBJECT", "properties": {"where": {"type": "STRING"}}},
}


def client(stack: Stack, key: str = API_KEY) -> genai.Client:
    """The official SDK, without retries."""
    options = types.HttpOptions(
        base_url=stack.url, timeout=120_000, retry_options=types.HttpRetryOptions(attempts=1)
    )
    return genai.Client(api_key=key, http_options=options)


def generate(
    stack: Stack, contents: Any = QUESTION, **config: Any
) -> types.GenerateContentResponse:
    with client(stack) as sdk:
        return sdk.models.generate_content(
            model=MODEL, contents=contents, config=types.GenerateContentConfig(**config)
        )


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def post(stack: Stack, method: str = "generateContent", **body: Any) -> Any:
    """The answer to a body that no SDK made."""
    body_sent = {"contents": [user({"text": QUESTION})], **body}
    return stack.post(f"/v1beta/models/{MODEL}:{method}", json=body_sent)
