"""Google's own types know every field of our answers, and we know every field of theirs.

The SDK's type definitions are walked, so what a new version brings fails here. They refuse unknown
fields. The extension `holdfast` is the only one that they do not know.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import pytest
from google.genai import types
from pydantic import BaseModel

from engine.protocol import (
    Finished,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolUseStart,
)
from gateway.base.errors import InvalidRequest
from gateway.dialects.gemini import caches, request, response
from gateway.dialects.gemini.request import decode_generate
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import LONG_TEXT, MODEL, post, user
from tests.gateway.openai_bodies import frames

ASKED: list[tuple[type[BaseModel], type[msgspec.Struct]]] = [
    (types.Part, request.Part),
    (types.Content, request.Content),
    (types.FunctionCall, request.FunctionCall),
    (types.FunctionResponse, request.FunctionResponse),
    (types.FunctionResponsePart, request.ResponsePart),
    (types.Blob, request.Blob),
    (types.FileData, request.FileData),
    (types.ExecutableCode, request.ExecutableCode),
    (types.CodeExecutionResult, request.CodeExecutionResult),
    (types.FunctionDeclaration, request.FunctionDeclaration),
    (types.Tool, request.Tool),
    (types.FunctionCallingConfig, request.FunctionCallingConfig),
    (types.ToolConfig, request.ToolConfig),
    (types.GenerationConfig, request.GenerationConfig),
    (types.ThinkingConfig, request.ThinkingConfig),
]
ANSWERED: list[tuple[type[BaseModel], type[msgspec.Struct]]] = [
    (types.GenerateContentResponse, response.GenerateContentResponse),
    (types.GenerateContentResponseUsageMetadata, response.UsageMetadata),
    (types.Candidate, response.Candidate),
    (types.Content, response.Content),
    (types.Part, response.Part),
    (types.FunctionCall, response.FunctionCall),
    (types.ModalityTokenCount, response.ModalityCount),
    (types.CachedContent, caches.CachedContent),
    (types.CachedContentUsageMetadata, caches.CacheUsage),
    (types.ListCachedContentsResponse, caches.CachedContentList),
]


def fields_of(sdk: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in sdk.model_fields.items()}


def ids(value: Any) -> str:
    return str(getattr(value, "__name__", ""))


@pytest.mark.parametrize(("sdk", "ours"), ASKED, ids=ids)
def test_every_field_of_the_sdk_is_known(sdk: type[BaseModel], ours: type[msgspec.Struct]) -> None:
    assert fields_of(sdk) <= set(ours.__struct_encode_fields__)


@pytest.mark.parametrize(("sdk", "ours"), ANSWERED, ids=ids)
def test_every_field_of_an_answer_is_the_sdks(
    sdk: type[BaseModel], ours: type[msgspec.Struct]
) -> None:
    assert set(ours.__struct_encode_fields__) - {"holdfast"} <= fields_of(sdk)


def test_every_ending_and_modality_is_one_that_the_sdk_knows() -> None:
    endings = set(get_args(response.FinishReason))
    assert endings <= {reason.value for reason in types.FinishReason}
    assert {"TEXT"} <= {modality.value for modality in types.MediaModality}


def test_every_setting_of_the_sdk_is_done_ignored_told_or_refused_by_its_name() -> None:
    """The SDK puts `GenerateContentConfig` on the wire; what it sends is taken or named."""
    settings = types.GenerationConfig.model_fields
    assert len(settings) > 20
    for name, field in settings.items():
        wire = field.alias or name
        for value in (1, "x", True, {}, [], 0.5):
            body = {"contents": [user({"text": "x"})], "generationConfig": {wire: value}}
            try:
                decode_generate(msgspec.json.encode(body), MODEL)
                break
            except InvalidRequest as error:
                assert wire in str(error), (wire, error)
        else:
            raise AssertionError(f"no value of {wire} is taken")


def strict(sdk: type[BaseModel], answer: dict[str, Any]) -> None:
    """Raise where Google's type does not have a field of the answer, or has it otherwise."""
    answer.pop("holdfast", None)
    sdk.model_validate(answer)


def answers(stack: Stack) -> Iterator[dict[str, Any]]:
    asked = {"tools": [{"functionDeclarations": [{"name": "look"}]}]}
    thinks = {"thinkingConfig": {"includeThoughts": True}}
    for reason in ("stop", "length", "tool_use", "stop_sequence", "context"):
        stack.engine.script = frames(
            ThinkingDelta("hm"),
            TextDelta("Looking."),
            ToolUseStart("call_a", "look"),
            ToolInputDelta('{"a": [1, {"b": null}]}'),
            Finished(reason=reason, output_tokens=9, thinking_tokens=2),  # type: ignore[arg-type]
        )
        for generation in ({}, thinks):
            body = {**asked, "generationConfig": generation}
            reply = post(stack, **body)
            if reply.status_code == 200:
                yield reply.json()
            reply = post(stack, "streamGenerateContent", **body)
            if reply.status_code == 200:
                yield from reply.json()


def test_googles_own_types_accept_every_answer_and_every_chunk(stack: Stack) -> None:
    found = list(answers(stack))
    assert len(found) > 25
    assert any("functionCall" in str(answer) for answer in found)
    for answer in found:
        strict(types.GenerateContentResponse, answer)


def test_googles_own_types_accept_what_is_counted_listed_and_cached(stack: Stack) -> None:
    counted = post(stack, "countTokens").json()
    counted.pop("promptTokensDetails")
    strict(types.CountTokensResponse, counted)
    with stack.http() as http:
        listed = http.get("/v1beta/models").json()
        assert listed["models"]
        for model in listed["models"]:
            # The SDK gives it another name: `supported_actions`.
            assert fields_of(types.Model) | {"supportedGenerationMethods", "baseModelId"} >= set(
                model
            )
        body = {
            "model": f"models/{MODEL}",
            "contents": [user({"text": LONG_TEXT})],
            "ttl": "300s",
            "displayName": "rules",
        }
        made = http.post("/v1beta/cachedContents", json=body)
        assert made.status_code == 200, made.text
        strict(types.CachedContent, made.json())
        name = made.json()["name"]
        page = http.get("/v1beta/cachedContents").json()
        strict(types.ListCachedContentsResponse, page)
        strict(types.CachedContent, http.get(f"/v1beta/{name}").json())
        changed = http.patch(f"/v1beta/{name}", json={"ttl": "600s"}).json()
        strict(types.CachedContent, changed)
        ended = datetime.fromisoformat(changed["expireTime"])
        assert ended > datetime.now(UTC)
        strict(types.DeleteCachedContentResponse, http.delete(f"/v1beta/{name}").json())


def test_our_model_has_no_field_that_google_has_not() -> None:
    known = fields_of(types.Model) | {"supportedGenerationMethods", "baseModelId"}
    assert set(response.Model.__struct_encode_fields__) <= known
