"""What each reason of a miss means, and what to change. Pure.

The words are those of the ledger's `miss_reason` and of `GET /admin/v1/turns/{id}/divergence`.
"""

from typing import NamedTuple


class Advice(NamedTuple):
    means: str
    change: str


_CHANGED = "Move what varies behind the last marker, or keep it byte for byte the same."
ADVICE = {
    "cold": Advice(
        "Nothing was known of this prefix: it had not come before, or long ago.",
        "Nothing, if it comes again. Pre-warm it with `max_tokens: 0` where the first one matters.",
    ),
    "no_breakpoint": Advice(
        "The request marks nothing, so nothing is held for it.",
        "Put `cache_control` on the last block that stays the same.",
    ),
    "no_boundary": Advice(
        "The chat template has no token boundary at the marker.",
        "Move the marker to the end of a message or of the system prompt.",
    ),
    "below_minimum": Advice(
        "The marked prefix is shorter than the shortest that is cached.",
        "Mark a longer prefix, or lower `min_cache_tokens` of the model or engine.",
    ),
    "ttl_expired": Advice(
        "It was there, and its lease ran out before it was read again.",
        "Use the one-hour TTL where Savings says that it is cheaper, or come sooner.",
    ),
    "best_effort_evicted": Advice(
        "It was written without a lease, as the lease budget was full, and had to make room.",
        "Give the engine more blocks or a larger `lease_share`, or mark fewer prefixes.",
    ),
    "sacrificed": Advice(
        "Its lease was given up: running requests needed the memory to finish.",
        "Give the engine more blocks, or let fewer requests run at once.",
    ),
    "dropped": Advice("An operator dropped it.", "Nothing: the next request writes it again."),
    "lookback_exceeded": Advice(
        "There is an entry, more than 20 blocks before the marker.",
        "Put a second marker nearer to the end of what was written before.",
    ),
    "in_progress_race": Advice(
        "Another request was still computing the same prefix when this one came.",
        "Wait for the first answer to begin before sending the others of a batch.",
    ),
    "not_told": Advice(
        "The server behind the engine does not say what it reused, so nothing counts as read.",
        "Start it so that it tells: the engine's guarantees in Fleet say how.",
    ),
    "engine_restart": Advice(
        "It stood on an engine that has been restarted since.",
        "Nothing in the prompt. Pre-warm after restarts; see Fleet.",
    ),
    "routed_elsewhere": Advice(
        "It stands on another engine, which was too busy or away.",
        "Nothing in the prompt. Look at the load in Fleet; a lower HOLDFAST_ROUTING_LOAD_WEIGHT"
        " follows prefixes more.",
    ),
    "model_changed": Advice(
        "Another model: no two models share a prefix.", "Send the conversation to one model."
    ),
    "tools_changed": Advice(
        "The list of tools differs: order, names, descriptions or schemas.",
        f"Send tools always in the same order. {_CHANGED}",
    ),
    "system_changed": Advice(
        "The system prompt differs: often a date, a user's name or a request id in it.", _CHANGED
    ),
    "messages_changed": Advice(
        "An earlier message differs: edited, shortened or in another order.",
        "Only ever append to a conversation. " + _CHANGED,
    ),
    "unavailable": Advice(
        "Not the text differs but how it is asked for: tool choice, thinking, effort or betas.",
        "Keep these parameters the same through a conversation.",
    ),
}
UNKNOWN = Advice("A reason that this dashboard does not know yet.", "See the gateway's README.")
GREW = Advice(
    "The prompt only grew: everything before is the same as in the earlier request.",
    "Nothing in the prompt.",
)


def advice(reason: str) -> Advice:
    return ADVICE.get(reason, UNKNOWN)
