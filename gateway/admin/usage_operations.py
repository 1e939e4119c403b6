"""The operations on usage, money and turns."""

from typing import Any

from gateway.admin.about import About
from gateway.admin.operation import ADMIN_KEYS, READING, Operation, path, query
from gateway.admin.report import CostReport, UsageReport
from gateway.admin.usage import MAX_MS, Group, Savings, Usage
from gateway.ledger.reads.latency import Latency
from gateway.ledger.reads.prefixes import PrefixReport
from gateway.ledger.reads.turns import Turn, TurnPage

_CSV = "text/csv; charset=utf-8"


def text(name: str, longest: int, shortest: int = 0, *, required: bool = False) -> dict[str, Any]:
    """A parameter of the query: a text of so many characters."""
    schema = {"type": "string", "minLength": shortest, "maxLength": longest}
    return query(name, schema, required=required)


def _one_of(name: str, *values: str) -> dict[str, Any]:
    return query(name, {"type": "string", "enum": list(values)})


def _list_of(name: str, *values: str, required: bool = False) -> dict[str, Any]:
    items = {"type": "string", "enum": list(values)}
    return query(name, {"type": "array", "items": items, "minItems": 1}, required=required)


_MOMENT = {"type": "integer", "minimum": 0, "maximum": MAX_MS}
_RANGE = (query("since_ms", _MOMENT), query("until_ms", _MOMENT), text("workspace", 64, 1))
FILTERED = (*_RANGE, text("engine", 64, 1), text("model", 128, 1))
_LIMIT = query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100})
_REPORT = (
    query("starting_at", {"type": "string", "maxLength": 40}, required=True),
    text("ending_at", 40),
    query("limit", {"type": "integer", "minimum": 1, "maximum": 1440}),
    text("page", 40),
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
        security=ADMIN_KEYS,
        parameters=parameters,
        errors=READING,
    )


USAGE_OPERATIONS = (
    _admin(
        "getAbout",
        "/admin/v1/about",
        "Who is asking, what can be filtered by, and what each number means.",
        About,
    ),
    _admin(
        "getUsage",
        "/admin/v1/usage",
        "A range, the one before it, and its intervals.",
        Usage,
        FILTERED,
    ),
    _admin(
        "getUsageGroups",
        "/admin/v1/usage/groups",
        "A range by workspace, key, engine, model or several of them.",
        list[Group],
        (_list_of("group_by", "workspace", "key", "engine", "model", required=True), *FILTERED),
    ),
    _admin("getSavings", "/admin/v1/savings", "What caching saved, and how.", Savings, FILTERED),
    _admin("getLatency", "/admin/v1/latency", "Times to first token.", Latency, FILTERED),
    _admin(
        "listPrefixes",
        "/admin/v1/prefixes",
        "Prefixes that came more than once.",
        list[PrefixReport],
        (*_RANGE, text("model", 128, 1), _LIMIT),
    ),
    _admin(
        "searchTurns",
        "/admin/v1/turns/search",
        "Turns, page by page, the newest first.",
        TurnPage,
        (
            *FILTERED,
            text("outcome", 32),
            text("miss_reason", 32),
            text("key", 32),
            text("prefix", 16),
            query("has_read", {"type": "boolean"}),
            _LIMIT,
            text("after", 96),
        ),
    ),
    _admin("getTurn", "/admin/v1/turns/{turn_id}", "One turn.", Turn, (path("turn_id"),)),
    _admin(
        "exportUsage",
        "/admin/v1/export.csv",
        "Usage as CSV.",
        None,
        (_one_of("rows", "hours", "days", "turns"), *FILTERED),
        _CSV,
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
