"""The sentences of an advice. Pure."""

from collections.abc import Sequence

from gateway.admin.structs.advice import Amount, FaultKind, Finding, Marker, Verdict
from gateway.advice.cache import Sums
from gateway.advice.faults import Fault

BEFORE_ANSWER = "before the last answer"
LAST_BLOCK = "last block"
_TO_LAST_MESSAGE = "Put the time into the last user message."
_FAULTS: dict[FaultKind, tuple[str, str]] = {
    "tool_order": (
        "The same tools come in another order",
        "Sort the tools by name before sending them.",
    ),
    "key_order": (
        "The same JSON comes with its keys in another order",
        "Write JSON with its keys in a fixed order.",
    ),
    "tool_set": (
        "Tools are added or left out",
        "Send all tools always, and choose with `tool_choice`.",
    ),
    "date": (
        "A part of the text changes once a day, as a date does",
        "Put the date into the last user message.",
    ),
    "hour": ("A part of the text changes once an hour, as a time does", _TO_LAST_MESSAGE),
    "minute": ("A part of the text changes once a minute, as a time does", _TO_LAST_MESSAGE),
    "nonce": (
        "A part of the text is new in every request, as an id or a time is",
        "Put it into the last user message, or leave it out.",
    ),
    "varying_text": (
        "A part of the text changes from request to request",
        "Put what changes behind what stays the same, in a block of its own.",
    ),
    "growing_text": (
        "The text grows with every request",
        "Leave the text as it is and put what is new into a message at the end.",
    ),
    "moved_text": (
        "A text stands at another place than before",
        "Keep the text at the place where it stood first.",
    ),
    "sliding_history": (
        "The first messages are left out and the others move up",
        "Append only, and cut the history rarely and by much.",
    ),
}
"""What happens, and what to change."""
# The last user message may be the one that has it.
_BEHIND = "Put it behind what stays the same, in a block of its own, or leave it out."
_WAYS = {
    "none": "no marker",
    "shared_5m": "a 5-minute marker behind what requests share",
    "shared_1h": "a 1-hour marker behind what requests share",
    "conversation_5m": "5-minute markers along the conversation",
    "conversation_1h": "1-hour markers along the conversation",
    "conversation_5m_shared_1h": "a 1-hour marker behind what requests share and 5-minute markers"
    " along the conversation",
}


def verdict(found: Verdict, markers: Sequence[Marker], saves: Amount, num_turns: int) -> str:
    if found == "leave":
        return (
            "Leave the markers as they are: none of the other ways is cheaper over"
            f" {num_turns:,} requests."
        )
    worth = (
        f"would have saved {saves.multiples:,.0f} input tokens' worth over {num_turns:,} requests"
    )
    if found == "unmark":
        return f"Mark nothing: that {worth}, since what is written is hardly read."
    where = ", ".join(f"{marker.place} ({marker.ttl})" for marker in markers)
    return f"Mark {where}, and nothing else: that {worth}."


def next_best(name: str, more: float) -> str:
    return f"The next way, {_WAYS[name]}, would have cost {more:,.0f} input tokens' worth more."


def fault(found: Fault) -> str:
    part = f" at its {found.part}" if found.part in ("start", "end") else ""
    part = " in its middle" if found.part == "middle" else part
    tokens = f"{found.tokens:,} tokens that were the same as before had to be sent anew"
    turns = f"{found.turns:,} request" + ("s" if found.turns != 1 else "")
    return f"{_FAULTS[found.kind][0]}{part}: {tokens} in {turns}."


def change(found: Fault) -> str:
    is_timed = found.kind in ("date", "hour", "minute", "nonce")
    return _BEHIND if is_timed and found.section == "messages" else _FAULTS[found.kind][1]


def too_short(count: int, longest: int, least: int, turns: list[str]) -> Finding:
    return Finding(
        kind="too_short",
        path="cache_control",
        text=f"{count:,} requests mark a prefix of at most {longest:,} tokens. The shortest that is"
        f" held has {least:,}.",
        change="Mark a longer prefix, or leave the marker out.",
        tokens=longest,
        multiples=0.0,
        num_turns=count,
        turns=turns,
    )


def changing_end(count: int, sums: Sums, turns: list[str]) -> Finding:
    written = sums.usage.written_tokens
    return Finding(
        kind="changing_end",
        path="cache_control",
        text=f"{count:,} requests wrote {written:,} tokens and none was read: what is marked never"
        " comes again in time.",
        change="Move the marker to the last block that comes again.",
        tokens=written,
        multiples=round(sums.usage.write_premium, 1),
        num_turns=count,
        turns=turns,
    )


def prewarm(sums: Sums, saved: float) -> str:
    if not sums.num_races:
        return (
            "A pre-warm saves no money: no request wrote what another one was writing."
            " It would only spare the first request its wait."
        )
    races = f"{sums.num_races:,} requests wrote {sums.raced:,} tokens that another was writing"
    if saved > 0:
        return f"A pre-warm pays: {races}. It would have saved {saved:,.0f} input tokens' worth."
    return f"A pre-warm does not pay: {races}, which is less than it would cost."
