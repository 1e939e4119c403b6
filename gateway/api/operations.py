"""Every operation of the HTTP API: its path, the types of its bodies, its errors."""

from dataclasses import dataclass
from typing import Any, Literal

from gateway.api.admin import EngineReport, Lease, Overview, TurnDivergence
from gateway.api.health import Readiness
from gateway.errors import (
    EngineTimeout,
    Forbidden,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    TooLarge,
    Unauthenticated,
    UnsupportedMedia,
)
from gateway.ledger.queries import Turn
from gateway.wire.anthropic.request import VERSIONS, CountTokensRequest, MessagesRequest
from gateway.wire.anthropic.response import Message, ModelInfo, ModelList, TokenCount
from gateway.wire.openai import models as openai_models
from gateway.wire.openai.request import ChatRequest, CompletionRequest
from gateway.wire.openai.response import ChatCompletion, Completion

Dialect = Literal["anthropic", "openai"]
EVENT_STREAM = "text/event-stream"
PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_READING = (InvalidRequest, Unauthenticated, NotFound, MethodNotAllowed, GatewayError, Overloaded)
_ASKING = (*_READING, Forbidden, TooLarge, UnsupportedMedia, EngineTimeout)
_Security = tuple[dict[str, list[str]], ...]
_KEYS: _Security = ({"apiKey": []}, {"bearer": []})
_ADMIN_KEYS: _Security = ({"adminKey": []}, {"bearer": []})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `replies` are alternatives; `other` is a content type of the 200
    besides JSON; `dialects` whose error envelopes, statuses and id headers it answers with."""

    id: str
    method: str
    path: str
    summary: str
    replies: tuple[Any, ...] = ()
    body: Any = None
    other: str | None = None
    security: _Security = ()
    parameters: tuple[dict[str, Any], ...] = ()
    errors: tuple[type[GatewayError], ...] = ()
    unready: Any = None
    dialects: tuple[Dialect, ...] = ("anthropic",)


def _query(name: str, schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": schema}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


OPERATIONS = (
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
        errors=_ASKING,
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
        errors=_ASKING,
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
        errors=_ASKING,
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
            _query("after_id", {"type": "string"}),
            _query("before_id", {"type": "string"}),
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}),
        ),
        errors=_READING,
    ),
    Operation(
        id="getModel",
        method="get",
        path="/v1/models/{model_id}",
        summary="One model.",
        replies=(ModelInfo, openai_models.Model),
        security=_KEYS,
        dialects=_BOTH,
        parameters=(_VERSION_OF_EITHER, _path("model_id")),
        errors=_READING,
    ),
    Operation(
        id="getOverview",
        method="get",
        path="/admin/v1/overview",
        summary="Totals, rates, savings and time buckets.",
        replies=(Overview,),
        security=_ADMIN_KEYS,
        parameters=(
            _query(
                "seconds",
                {"type": "integer", "minimum": 60, "maximum": 31_536_000, "default": 3600},
            ),
        ),
        errors=_READING,
    ),
    Operation(
        id="listEngines",
        method="get",
        path="/admin/v1/engines",
        summary="State, description and statistics of each engine.",
        replies=(list[EngineReport],),
        security=_ADMIN_KEYS,
        errors=_READING,
    ),
    Operation(
        id="listTurns",
        method="get",
        path="/admin/v1/turns",
        summary="The newest turns.",
        replies=(list[Turn],),
        security=_ADMIN_KEYS,
        parameters=(
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
        ),
        errors=_READING,
    ),
    Operation(
        id="getDivergence",
        method="get",
        path="/admin/v1/turns/{turn_id}/divergence",
        summary="Where a turn's prompt first differs from an earlier one's.",
        replies=(TurnDivergence,),
        security=_ADMIN_KEYS,
        parameters=(
            _path("turn_id"),
            _query("from", {"type": "string", "minLength": 1, "maxLength": 64}, required=True),
        ),
        errors=_READING,
    ),
    Operation(
        id="listLeases",
        method="get",
        path="/admin/v1/leases",
        summary="Live entries of all engines.",
        replies=(list[Lease],),
        security=_ADMIN_KEYS,
        errors=_READING,
    ),
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
