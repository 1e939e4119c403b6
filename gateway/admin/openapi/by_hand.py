"""The operations of the model APIs, described by hand.

Their handlers read and write raw bytes, so no signature tells the types of their bodies.
"""

from typing import Any

from gateway.admin.openapi.operation import (
    EVENT_STREAM,
    READING,
    SENDING,
    Operation,
    Security,
)
from gateway.base.errors import EngineTimeout, RateLimited, SpendLimitReached
from gateway.dialects.anthropic import batches
from gateway.dialects.anthropic.request import VERSIONS, CountTokensRequest, MessagesRequest
from gateway.dialects.anthropic.response import Message, ModelInfo, ModelList, TokenCount
from gateway.dialects.gemini import caches
from gateway.dialects.gemini import response as gemini_models
from gateway.dialects.gemini.request import GenerateRequest
from gateway.dialects.gemini.response import GenerateContentResponse
from gateway.dialects.gemini.response import TokenCount as TokenTotal
from gateway.dialects.openai import response as openai_models
from gateway.dialects.openai.request import ChatRequest, CompletionRequest
from gateway.dialects.openai.response import ChatCompletion, Completion
from gateway.dialects.responses.request import ResponsesRequest
from gateway.dialects.responses.response import InputTokens, Response
from gateway.prompt.ask import Dialect

_ASKING = (*SENDING, EngineTimeout)
_TURNS = (*_ASKING, RateLimited, SpendLimitReached)
_GOOGLE_KEYS: Security = ({"apiKey": []}, {"googleKey": []}, {"bearer": []})
_KEYS: Security = ({"apiKey": []}, {"bearer": []})
_VERSION = {
    "name": "anthropic-version",
    "in": "header",
    "required": True,
    "schema": {"type": "string", "enum": list(VERSIONS)},
}
# Both SDKs list models. Anthropic's clients must send this header, OpenAI's do not.
_VERSION_OF_EITHER = {**_VERSION, "required": False, "schema": {"type": "string"}}
_MODEL_ID = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
_ALL: tuple[Dialect, ...] = ("anthropic", "openai", "gemini")
_CALLED_MODEL = {
    **_MODEL_ID,
    "description": "The model's id, `:` and one of `generateContent`, `streamGenerateContent` and"
    " `countTokens`.",
}
_RESPONSE_ID = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


_HEADERS = [
    {
        "name": "anthropic-beta",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Names of betas, separated by commas; every one is accepted.",
    },
    {
        "name": "anthropic-workspace-id",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Must be the key's own workspace.",
    },
]


def _gemini_call(operation_id: str, path: str) -> Operation:
    return Operation(
        id=operation_id,
        method="post",
        path=path,
        summary="Answer contents as Google does, also as a stream, or count their tokens.",
        replies=(GenerateContentResponse, TokenTotal, list[GenerateContentResponse]),
        body=GenerateRequest,
        other=EVENT_STREAM,
        security=_GOOGLE_KEYS,
        parameters=(_CALLED_MODEL, _query("alt", {"type": "string", "enum": ["json", "sse"]})),
        errors=_TURNS,
        dialects=("gemini",),
        is_lenient=True,
    )


_CONTENT_ID = {"name": "content_id", "in": "path", "required": True, "schema": {"type": "string"}}


def _cached_contents(at: str, suffix: str) -> tuple[Operation, ...]:
    """The calls of cachedContents under one of the two versions of the path."""
    path = f"/{at}/cachedContents"
    one = f"{path}/{{content_id}}"
    shared: dict[str, Any] = {"security": _GOOGLE_KEYS, "dialects": ("gemini",)}
    body: dict[str, Any] = {"is_lenient": True, "errors": _TURNS, **shared}
    read: dict[str, Any] = {"errors": READING, **shared}
    pages = (
        _query("pageSize", {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}),
        _query("pageToken", {"type": "string"}),
    )
    return (
        Operation(
            id=f"createCachedContent{suffix}",
            method="post",
            path=path,
            summary="Have a prompt held under a name, for a lifetime of its own.",
            replies=(caches.CachedContent,),
            body=caches.CreateRequest,
            **body,
        ),
        Operation(
            id=f"listCachedContents{suffix}",
            method="get",
            path=path,
            summary="The workspace's cached contents, in pages.",
            replies=(caches.CachedContentList,),
            parameters=pages,
            **read,
        ),
        Operation(
            id=f"getCachedContent{suffix}",
            method="get",
            path=one,
            summary="One cached content.",
            replies=(caches.CachedContent,),
            parameters=(_CONTENT_ID,),
            **read,
        ),
        Operation(
            id=f"updateCachedContent{suffix}",
            method="patch",
            path=one,
            summary="Move the end of a cached content.",
            replies=(caches.CachedContent,),
            body=caches.UpdateRequest,
            parameters=(_CONTENT_ID,),
            **body,
        ),
        Operation(
            id=f"deleteCachedContent{suffix}",
            method="delete",
            path=one,
            summary="End a cached content and its lease.",
            replies=(caches.Nothing,),
            parameters=(_CONTENT_ID,),
            **read,
        ),
    )


_BATCH_ID = {"name": "batch_id", "in": "path", "required": True, "schema": {"type": "string"}}
_BATCHES = "/v1/messages/batches"


def _of_batch(operation_id: str, method: str, path: str, summary: str, reply: Any) -> Operation:
    return Operation(
        id=operation_id,
        method=method,
        path=f"{_BATCHES}/{{batch_id}}{path}",
        summary=summary,
        replies=() if reply is None else (reply,),
        other="application/x-jsonl" if reply is None else None,
        security=_KEYS,
        parameters=(_BATCH_ID,),
        errors=READING,
    )


_BATCH_OPERATIONS = (
    Operation(
        id="createMessageBatch",
        method="post",
        path=_BATCHES,
        summary="Run many messages behind all other turns.",
        replies=(batches.MessageBatch,),
        body=batches.CreateBatch,
        security=_KEYS,
        parameters=(_VERSION,),
        errors=_TURNS,
    ),
    Operation(
        id="listMessageBatches",
        method="get",
        path=_BATCHES,
        summary="The workspace's batches, the newest first.",
        replies=(batches.MessageBatchList,),
        security=_KEYS,
        parameters=(
            _query("after_id", {"type": "string"}),
            _query("before_id", {"type": "string"}),
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}),
        ),
        errors=READING,
    ),
    _of_batch("getMessageBatch", "get", "", "One batch.", batches.MessageBatch),
    _of_batch("deleteMessageBatch", "delete", "", "Forget an ended batch.", batches.DeletedBatch),
    _of_batch("cancelMessageBatch", "post", "/cancel", "End a batch early.", batches.MessageBatch),
    _of_batch("getMessageBatchResults", "get", "/results", "A line of JSON for each row.", None),
)

MODEL_OPERATIONS = (
    *_BATCH_OPERATIONS,
    *_cached_contents("v1beta", ""),
    *_cached_contents("v1", "AtV1"),
    Operation(
        id="createMessage",
        method="post",
        path="/v1/messages",
        summary="Answer a prompt; with `stream` as server-sent events.",
        replies=(Message,),
        body=MessagesRequest,
        other=EVENT_STREAM,
        security=_KEYS,
        parameters=(_VERSION, *_HEADERS),
        errors=_TURNS,
    ),
    Operation(
        id="countTokens",
        method="post",
        path="/v1/messages/count_tokens",
        summary="Count a prompt's tokens, exactly.",
        replies=(TokenCount,),
        body=CountTokensRequest,
        security=_KEYS,
        parameters=(_VERSION, *_HEADERS),
        errors=_ASKING,
    ),
    Operation(
        id="createChatCompletion",
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation as OpenAI does; with `stream` as server-sent events.",
        replies=(ChatCompletion,),
        body=ChatRequest,
        other=EVENT_STREAM,
        security=_KEYS,
        errors=_TURNS,
        dialects=("openai",),
    ),
    Operation(
        id="createCompletion",
        method="post",
        path="/v1/completions",
        summary="Continue a text as OpenAI does; with `stream` as server-sent events.",
        replies=(Completion,),
        body=CompletionRequest,
        other=EVENT_STREAM,
        security=_KEYS,
        errors=_TURNS,
        dialects=("openai",),
    ),
    Operation(
        id="createResponse",
        method="post",
        path="/v1/responses",
        summary="Answer a conversation as OpenAI's Responses API does; with `stream` as server-sent"
        " events.",
        replies=(Response,),
        body=ResponsesRequest,
        other=EVENT_STREAM,
        security=_KEYS,
        errors=_TURNS,
        dialects=("openai",),
    ),
    Operation(
        id="countInputTokens",
        method="post",
        path="/v1/responses/input_tokens",
        summary="Count the tokens of a request of the Responses API, exactly.",
        replies=(InputTokens,),
        body=ResponsesRequest,
        security=_KEYS,
        errors=_ASKING,
        dialects=("openai",),
    ),
    *(
        Operation(
            id=f"{method}Response",
            method=method,
            path="/v1/responses/{response_id}",
            summary="Not found: no response is kept.",
            security=_KEYS,
            parameters=(_RESPONSE_ID,),
            errors=READING,
            dialects=("openai",),
        )
        for method in ("get", "delete")
    ),
    Operation(
        id="listModels",
        method="get",
        path="/v1/models",
        summary="The models that may be asked for.",
        replies=(ModelList, openai_models.ModelList, gemini_models.ModelList),
        security=_KEYS,
        dialects=_ALL,
        parameters=(
            _VERSION_OF_EITHER,
            _query("after_id", {"type": "string"}),
            _query("before_id", {"type": "string"}),
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}),
        ),
        errors=READING,
    ),
    Operation(
        id="getModel",
        method="get",
        path="/v1/models/{model_id}",
        summary="One model.",
        replies=(ModelInfo, openai_models.Model, gemini_models.Model),
        security=_KEYS,
        dialects=_ALL,
        parameters=(_VERSION_OF_EITHER, _MODEL_ID),
        errors=READING,
    ),
    _gemini_call("callGeminiModel", "/v1beta/models/{model_id}"),
    _gemini_call("callGeminiModelAtV1", "/v1/models/{model_id}"),
    Operation(
        id="listGeminiModels",
        method="get",
        path="/v1beta/models",
        summary="The models that may be asked for, as Google lists them.",
        replies=(gemini_models.ModelList,),
        security=_GOOGLE_KEYS,
        dialects=("gemini",),
        errors=READING,
    ),
    Operation(
        id="getGeminiModel",
        method="get",
        path="/v1beta/models/{model_id}",
        summary="One model, as Google shows it.",
        replies=(gemini_models.Model,),
        security=_GOOGLE_KEYS,
        dialects=("gemini",),
        parameters=(_MODEL_ID,),
        errors=READING,
    ),
)
