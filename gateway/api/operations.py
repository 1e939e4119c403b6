"""Every operation of the HTTP API: its path, the types of its bodies, its errors."""

from dataclasses import dataclass
from typing import Any, Literal

from gateway.api.admin import EngineReport, Lease, Overview, TurnDivergence
from gateway.api.admin_report import CostReport, UsageReport
from gateway.api.admin_usage import MAX_MS, Group, Savings, Usage
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
from gateway.ledger.queries_latency import Latency
from gateway.ledger.queries_prefixes import PrefixReport
from gateway.ledger.queries_turns import Turn, TurnPage
from gateway.wire.anthropic.request import VERSIONS, CountTokensRequest, MessagesRequest
from gateway.wire.anthropic.response import Message, ModelInfo, ModelList, TokenCount
from gateway.wire.openai import models as openai_models
from gateway.wire.openai.request import ChatRequest, CompletionRequest
from gateway.wire.openai.response import ChatCompletion, Completion

Dialect = Literal["anthropic", "openai"]
EVENT_STREAM = "text/event-stream"
PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CSV = "text/csv; charset=utf-8"
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


def _text(name: str, longest: int, shortest: int = 0) -> dict[str, Any]:
    return _query(name, {"type": "string", "minLength": shortest, "maxLength": longest})


def _one_of(name: str, *values: str) -> dict[str, Any]:
    return _query(name, {"type": "string", "enum": list(values)})


def _list_of(name: str, *values: str, required: bool = False) -> dict[str, Any]:
    items = {"type": "string", "enum": list(values)}
    return _query(name, {"type": "array", "items": items, "minItems": 1}, required=required)


_MOMENT = {"type": "integer", "minimum": 0, "maximum": MAX_MS}
_RANGE = (_query("since_ms", _MOMENT), _query("until_ms", _MOMENT), _text("workspace", 64, 1))
_FILTERED = (*_RANGE, _text("engine", 64, 1), _text("model", 128, 1))
_LIMIT = _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100})
_REPORT = (
    _query("starting_at", {"type": "string", "maxLength": 40}, required=True),
    _text("ending_at", 40),
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 1440}),
    _text("page", 40),
)


def _admin(
    id: str,
    path: str,
    summary: str,
    reply: Any,
    parameters: tuple[dict[str, Any], ...] = (),
    other: str | None = None,
) -> Operation:
    """A GET that needs the admin key."""
    return Operation(
        id=id,
        method="get",
        path=path,
        summary=summary,
        replies=() if reply is None else (reply,),
        other=other,
        security=_ADMIN_KEYS,
        parameters=parameters,
        errors=_READING,
    )


_USAGE = (
    _admin(
        "getUsage",
        "/admin/v1/usage",
        "A range, the one before it, and its intervals.",
        Usage,
        _FILTERED,
    ),
    _admin(
        "getUsageGroups",
        "/admin/v1/usage/groups",
        "A range by workspace, key, engine, model or several of them.",
        list[Group],
        (_list_of("group_by", "workspace", "key", "engine", "model", required=True), *_FILTERED),
    ),
    _admin("getSavings", "/admin/v1/savings", "What caching saved, and how.", Savings, _FILTERED),
    _admin("getLatency", "/admin/v1/latency", "Times to first token.", Latency, _FILTERED),
    _admin(
        "listPrefixes",
        "/admin/v1/prefixes",
        "Prefixes that came more than once.",
        list[PrefixReport],
        (*_RANGE, _text("model", 128, 1), _LIMIT),
    ),
    _admin(
        "searchTurns",
        "/admin/v1/turns/search",
        "Turns, page by page, the newest first.",
        TurnPage,
        (
            *_FILTERED,
            _text("outcome", 32),
            _text("miss_reason", 32),
            _text("key", 32),
            _text("prefix", 16),
            _query("has_read", {"type": "boolean"}),
            _LIMIT,
            _text("after", 96),
        ),
    ),
    _admin("getTurn", "/admin/v1/turns/{turn_id}", "One turn.", Turn, (_path("turn_id"),)),
    _admin(
        "exportUsage",
        "/admin/v1/export.csv",
        "Usage as CSV.",
        None,
        (_one_of("rows", "hours", "days", "turns"), *_FILTERED),
        CSV,
    ),
    _admin(
        "getUsageReport",
        "/v1/organizations/usage_report/messages",
        "Usage in the shape of Anthropic's Admin API.",
        UsageReport,
        (
            *_REPORT,
            _one_of("bucket_width", "1m", "1h", "1d"),
            _list_of("group_by[]", "api_key_id", "workspace_id", "model"),
        ),
    ),
    _admin(
        "getCostReport",
        "/v1/organizations/cost_report",
        "Own costs in the shape of Anthropic's Admin API.",
        CostReport,
        (*_REPORT, _list_of("group_by[]", "workspace_id", "description")),
    ),
)

OPERATIONS = (
    *_USAGE,
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
