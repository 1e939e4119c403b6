"""Automatic caching: breakpoints for requests that mark nothing.

Pure. The dialects without markers of their own use it, with the policy of the request's key. There
are up to three breakpoints: behind tools and system prompt, behind the prompt of the request before
this one, and behind the last turn. The second costs no write, since that prefix is already held. It
is there so that the prefix is found after a turn with more segments than an engine looks back.
"""

from collections.abc import Sequence
from itertools import pairwise

from engine.protocol import MAX_BREAKPOINTS, Breakpoint, Prompt, outlives
from gateway.base.grants import AutoCache
from gateway.prompt.layout import Slot


def add_automatic(
    prompt: Prompt, slots: Sequence[Slot], given: Sequence[Breakpoint], policy: AutoCache
) -> list[Breakpoint]:
    """The client's breakpoints with those of the policy, in prompt order.

    `slots` are the prompt's segments. If the client set breakpoints, only the one behind the last
    turn is added, because a shorter TTL may not come before a longer one.
    """
    if policy.mode == "off" or len(given) >= MAX_BREAKPOINTS:
        return list(given)
    found = {point.segment: point for point in given}
    targets = _targets(prompt, slots, policy)
    if given:
        targets = targets[-1:] if policy.mode == "conversation" else []
    for segment in targets:
        found.setdefault(segment, Breakpoint(segment, policy.ttl))
    if _breaks_order(found):
        return list(given)
    return [found[segment] for segment in sorted(found)]


def _targets(prompt: Prompt, slots: Sequence[Slot], policy: AutoCache) -> list[int]:
    head = len(prompt.tools) + len(prompt.system)
    ends = [head - 1]
    if policy.mode == "conversation":
        ends += [_end_before_answer(prompt, head), len(slots) - 1]
    return [end for end in (_carrier(slots, end) for end in ends) if end is not None]


def _end_before_answer(prompt: Prompt, head: int) -> int:
    """The last segment before the last answer of the model, -1 without one."""
    end, found = head - 1, -1
    for message in prompt.messages:
        if message.role == "assistant":
            found = end
        end += len(message.parts)
    return found


def _carrier(slots: Sequence[Slot], end: int) -> int | None:
    """The last segment up to `end` that can carry a marker."""
    for segment in range(end, -1, -1):
        if slots[segment].can_carry:
            return segment
    return None


def _breaks_order(found: dict[int, Breakpoint]) -> bool:
    ttls = [found[segment].ttl for segment in sorted(found)]
    return any(outlives(later, earlier) for earlier, later in pairwise(ttls))
