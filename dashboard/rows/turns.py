"""Rows of single requests. Pure."""

from collections.abc import Sequence

from dashboard.admin.shapes.turns import Refusal, Turn
from dashboard.rows.row import Row, in_dollars
from dashboard.ui.advice import reason_title
from dashboard.ui.formats import dollars, seconds
from engine.protocol import TTLS, WRITE_FIELDS


def turn_table(turns: Sequence[Turn]) -> list[Row]:
    return [
        {
            "Time (UTC)": each.opened.replace(tzinfo=None),
            "Outcome": each.outcome,
            "Missed because": None if each.miss_reason is None else reason_title(each.miss_reason),
            "HTTP": each.status,
            "Workspace": each.workspace,
            "Model": each.model,
            "Read (tokens)": each.cache_read_tokens,
            "Written (tokens)": each.cache_write_5m_tokens + each.cache_write_1h_tokens,
            "Uncached (tokens)": each.input_tokens,
            "Output (tokens)": each.output_tokens,
            "First token (s)": each.first_token_seconds,
            "Duration (s)": each.duration_seconds,
            "Cost ($)": in_dollars(each.cost_nano),
            "Net saved ($)": in_dollars(each.saved_nano),
            "Error": each.error,
            "Engine": each.engine,
            "Name": each.name,
            "Client": each.user_agent,
            "Id": each.id,
            "Request id": each.http_request_id,
        }
        for each in turns
    ]


def refusal_table(found: Sequence[Refusal]) -> list[Row]:
    return [
        {
            "Time (UTC)": each.at.replace(tzinfo=None),
            "HTTP": each.status,
            "Type": each.type,
            "Error": each.message,
            "Path": each.path,
            "Workspace": each.workspace,
            "Client": each.user_agent,
            "Request id": each.request_id,
        }
        for each in found
    ]


def turn_details(turn: Turn) -> list[tuple[str, str | None]]:
    """Every field as text, in the order of a request's life."""
    tokens = {
        "Read (tokens)": turn.cache_read_tokens,
        **{
            f"Written, {TTLS[ttl].words} (tokens)": getattr(turn, name)
            for ttl, name in WRITE_FIELDS.items()
        },
        "Uncached (tokens)": turn.input_tokens,
        "Reused unmarked (tokens)": turn.automatic_tokens,
        "Computed (tokens)": turn.computed_tokens,
        "Output (tokens)": turn.output_tokens,
        "Held by some engine (tokens)": turn.available_tokens,
        "Held by this engine (tokens)": turn.captured_tokens,
    }
    times = {
        "In the queue": turn.queue_seconds,
        "Prefill": turn.prefill_seconds,
        "First token": turn.first_token_seconds,
        "Decode": turn.decode_seconds,
        "Duration": turn.duration_seconds,
    }
    return [
        ("Workspace", turn.workspace),
        ("Key", turn.key_id),
        ("Model", turn.model),
        ("Engine", turn.engine),
        ("API", turn.dialect),
        ("Streamed", "yes" if turn.stream else "no"),
        ("Outcome", turn.outcome),
        ("HTTP status", None if turn.status is None else str(turn.status)),
        ("Error", turn.error),
        ("Request id", turn.http_request_id),
        ("Client", turn.user_agent),
        ("Name", turn.name),
        ("Stop reason", turn.stop_reason),
        ("Missed because", None if turn.miss_reason is None else reason_title(turn.miss_reason)),
        ("Prefix", turn.prefix),
        ("TTL", turn.prefix_ttl),
        *((name, None if count is None else f"{count:,}") for name, count in tokens.items()),
        *((name, None if value is None else seconds(value)) for name, value in times.items()),
        ("Cost", dollars(turn.cost_nano)),
        ("Net saved", dollars(turn.saved_nano)),
    ]
