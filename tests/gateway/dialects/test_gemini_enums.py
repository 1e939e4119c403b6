"""`text/x.enum`: one of a schema's strings, without quotes, as the SDK's documentation has it."""

from enum import Enum
from typing import Any

import pytest
from google.genai import types

from engine.protocol import Finished, TextDelta
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import MODEL, QUESTION, client, generate, post
from tests.gateway.openai_bodies import frames


class Animal(Enum):
    CAT = "a cat"
    DOG = "a dog"


ASKED: dict[str, Any] = {"response_mime_type": "text/x.enum", "response_schema": Animal}


def says(stack: Stack, *pieces: str, cut: bool = False) -> None:
    end = Finished(reason="length" if cut else "stop", output_tokens=3)
    stack.engine.script = frames(*map(TextDelta, pieces), end)


def test_an_enum_is_answered_by_its_word(stack: Stack) -> None:
    says(stack, '"a ', "\\u0064o", 'g"')
    answer = generate(stack, **ASKED)
    assert answer.text == "a dog" and answer.parsed is Animal.DOG
    schema = stack.engine.requests[-1].output_schema
    assert schema is not None
    assert (schema["type"], schema["enum"]) == ("string", ["a cat", "a dog"])


def test_a_stream_has_the_word_in_its_last_chunk(stack: Stack) -> None:
    says(stack, '"a ', 'cat"')
    config = types.GenerateContentConfig(**ASKED)
    with client(stack) as sdk:
        chunks = list(
            sdk.models.generate_content_stream(model=MODEL, contents=QUESTION, config=config)
        )
    assert [chunk.text for chunk in chunks] == ["a cat"]


def test_a_word_that_was_cut_off_has_no_quotes(stack: Stack) -> None:
    says(stack, '"a c', cut=True)
    assert generate(stack, **ASKED).text == "a c"


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "responseSchema"),
        ({"responseSchema": {"type": "STRING"}}, "responseSchema"),
        ({"responseSchema": {"type": "INTEGER", "enum": [1]}}, "responseSchema"),
        ({"responseJsonSchema": {"type": "string"}}, "responseJsonSchema"),
        (
            {"responseSchema": {"type": "STRING", "enum": ["a"]}, "responseLogprobs": True},
            "responseLogprobs",
        ),
    ],
)
def test_what_is_no_enum_of_strings_is_refused(
    stack: Stack, config: dict[str, Any], field: str
) -> None:
    reply = post(stack, generationConfig={"responseMimeType": "text/x.enum", **config})
    assert reply.status_code == 400
    violation = reply.json()["error"]["details"][0]["fieldViolations"][0]
    assert violation["field"] == f"generationConfig.{field}"
