"""Every operation of the HTTP API: its path, the types of its bodies, its errors."""

from typing import Any

from gateway.admin.access_operations import ACCESS_OPERATIONS
from gateway.admin.divergence import TurnDivergence
from gateway.admin.engine_operations import ENGINE_OPERATIONS
from gateway.admin.live_operations import LIVE_OPERATIONS
from gateway.admin.operation import (
    ADMIN_KEYS,
    EVENT_STREAM,
    PLAIN_TEXT,
    READING,
    Dialect,
    Operation,
    Security,
    path,
    query,
)
from gateway.admin.overview import Overview
from gateway.admin.usage_operations import USAGE_OPERATIONS
from gateway.base.errors import (
    EngineTimeout,
    RateLimited,
    SpendLimitReached,
    TooLarge,
    UnsupportedMedia,
)
from gateway.dialects.anthropic.request import VERSIONS, CountTokensRequest, MessagesRequest
from gateway.dialects.anthropic.response import Message, ModelInfo, ModelList, TokenCount
from gateway.dialects.openai import models as openai_models
from gateway.dialects.openai.request import ChatRequest, CompletionRequest
from gateway.dialects.openai.response import ChatCompletion, Completion
from gateway.http.health import Readiness
from gateway.ledger.reads.turns import Turn

_ASKING = (*READING, TooLarge, UnsupportedMedia, EngineTimeout)
_TURNS = (*_ASKING, RateLimited, SpendLimitReached)
_KEYS: Security = ({"apiKey": []}, {"bearer": []})
_VERSION = {
    "name": "anthropic-version",
    "in": "header",
    "required": True,
    "schema": {"type": "string", "enum": list(VERSIONS)},
}
# Both SDKs list models: Anthropic's clients are known by the header that they must send.
_VERSION_OF_EITHER = {**_VERSION, "required": False, "schema": {"type": "string"}}
_BOTH: tuple[Dialect, ...] = ("anthropic", "openai")
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

OPERATIONS = (
    *USAGE_OPERATIONS,
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
        id="listModels",
        method="get",
        path="/v1/models",
        summary="The models that may be asked for.",
        replies=(ModelList, openai_models.ModelList),
        security=_KEYS,
        dialects=_BOTH,
        parameters=(
            _VERSION_OF_EITHER,
            query("after_id", {"type": "string"}),
            query("before_id", {"type": "string"}),
            query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}),
        ),
        errors=READING,
    ),
    Operation(
        id="getModel",
        method="get",
        path="/v1/models/{model_id}",
        summary="One model.",
        replies=(ModelInfo, openai_models.Model),
        security=_KEYS,
        dialects=_BOTH,
        parameters=(_VERSION_OF_EITHER, path("model_id")),
        errors=READING,
    ),
    Operation(
        id="getOverview",
        method="get",
        path="/admin/v1/overview",
        summary="Totals, rates, savings and time buckets.",
        replies=(Overview,),
        security=ADMIN_KEYS,
        parameters=(
            query(
                "seconds",
                {"type": "integer", "minimum": 60, "maximum": 31_536_000, "default": 3600},
            ),
        ),
        errors=READING,
    ),
    *ENGINE_OPERATIONS,
    Operation(
        id="listTurns",
        method="get",
        path="/admin/v1/turns",
        summary="The newest turns.",
        replies=(list[Turn],),
        security=ADMIN_KEYS,
        parameters=(
            query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
        ),
        errors=READING,
    ),
    Operation(
        id="getDivergence",
        method="get",
        path="/admin/v1/turns/{turn_id}/divergence",
        summary="Where a turn's prompt first differs from an earlier one's.",
        replies=(TurnDivergence,),
        security=ADMIN_KEYS,
        parameters=(
            path("turn_id"),
            query("from", {"type": "string", "minLength": 1, "maxLength": 64}),
        ),
        errors=READING,
    ),
    *LIVE_OPERATIONS,
    *ACCESS_OPERATIONS,
    Operation(
        id="getHealth",
        method="get",
        path="/healthz",
        summary="The process serves.",
        replies=(dict[str, str],),
    ),
    Operation(
        id="getReadiness",
        method="get",
        path="/readyz",
        summary="Ready while at least one engine is.",
        replies=(Readiness,),
        unready=Readiness,
    ),
    Operation(
        id="getReadinessAsHealth",
        method="get",
        path="/health",
        summary="Ready while at least one engine is, under vLLM's name for it.",
        replies=(Readiness,),
        unready=Readiness,
    ),
    Operation(
        id="getMetrics",
        method="get",
        path="/metrics",
        summary="Prometheus metrics.",
        other=PLAIN_TEXT,
    ),
    Operation(
        id="getDescription",
        method="get",
        path="/openapi.json",
        summary="This description.",
        replies=(dict[str, Any],),
    ),
)
