"""Rows of advice: streams, ways to mark, findings. Pure."""

from collections.abc import Sequence

from dashboard.admin.shapes.advice import Finding, Marker, Outcome, StreamAdvice
from dashboard.rows.row import Row, in_dollars
from engine.protocol import WRITE_FIELDS

WAYS = {
    "observed": "As it was",
    "as_sent": "The same markers, nothing lost",
    "none": "No marker",
    "shared_5m": "Shared beginning, 5 minutes",
    "shared_1h": "Shared beginning, 1 hour",
    "conversation_5m": "Conversation, 5 minutes",
    "conversation_1h": "Conversation, 1 hour",
    "conversation_5m_shared_1h": "Shared beginning 1 hour, conversation 5 minutes",
}
VERDICTS = {"mark": "Change the markers", "unmark": "Mark nothing", "leave": "Leave as it is"}


def stream_rows(streams: Sequence[StreamAdvice]) -> list[Row]:
    return [
        {
            "Workspace": stream.workspace,
            "Key": stream.key,
            "Model": stream.model,
            "Requests": stream.num_turns,
            "Advice": VERDICTS.get(stream.verdict, stream.verdict),
            "Markers": markers(stream.markers),
            "Would save (input tokens)": round(stream.saves.multiples),
            "Would save ($)": in_dollars(stream.saves.nano),
            "Prefill saved (s)": stream.saves.prefill_seconds,
            "Faults": len(stream.findings),
        }
        for stream in streams
    ]


def way_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    return [
        {
            "Markers": WAYS.get(each.name, each.name),
            "Cost (input tokens)": round(each.multiples),
            "Cost ($)": in_dollars(each.nano),
            "Read": each.cache_read_tokens,
            **{f"Written {ttl}": getattr(each, name) for ttl, name in WRITE_FIELDS.items()},
            "Input": each.input_tokens,
            "Requests with a read": each.requests_with_read,
        }
        for each in outcomes
    ]


def finding_rows(findings: Sequence[Finding]) -> list[Row]:
    return [
        {
            "Block": each.path,
            "What": each.text,
            "What to change": each.change,
            "Tokens": each.tokens,
            "Worth ($)": in_dollars(each.nano),
            "Requests": each.num_turns or None,
            "From": ", ".join(each.turns),
        }
        for each in findings
    ]


def markers(found: Sequence[Marker]) -> str:
    return ", ".join(f"{each.place} ({each.ttl})" for each in found)
