"""What became of each token of the playground's prompt. Pure."""

from collections.abc import Sequence
from typing import Any

from dashboard.playground.answer import Message, TokenUsage
from dashboard.playground.prompt import PromptPart

CLASSES = ("Read from cache", "Written, 5 minutes", "Written, 1 hour", "Uncached")


def prompt_spans(usage: TokenUsage) -> list[dict[str, Any]]:
    """The prompt from its first token to its last, by class.

    Tokens that were read come first, then those that were written, then the rest.
    """
    creation, start, rows = usage.cache_creation, 0, []
    counts = (
        usage.cache_read_input_tokens,
        creation.ephemeral_5m_input_tokens,
        creation.ephemeral_1h_input_tokens,
        usage.input_tokens,
    )
    # Longer TTLs come first in a prompt: the contract asks for that order.
    order = (0, 2, 1, 3)
    for number in order:
        if counts[number]:
            end = start + counts[number]
            rows.append(
                {"class": CLASSES[number], "start": start, "end": end, "tokens": counts[number]}
            )
            start = end
    return rows


def part_rows(parts: Sequence[PromptPart], message: Message) -> list[dict[str, Any]]:
    """Each part of the prompt with its tokens by class.

    The engine tells where marked parts end. Between two ends tokens are divided among the parts by
    their length in characters; `is_exact` is false for these.
    """
    spans = prompt_spans(message.usage)
    total = spans[-1]["end"] if spans else 0
    known = _ends(parts, message, total)
    rows, start = [], 0
    for part, (end, is_exact) in zip(parts, known, strict=True):
        row: dict[str, Any] = {"part": part, "tokens": end - start, "is_exact": is_exact}
        for span in spans:
            overlap = min(end, span["end"]) - max(start, span["start"])
            if overlap > 0:
                row[span["class"]] = overlap
        rows.append(row)
        start = end
    return rows


def _ends(parts: Sequence[PromptPart], message: Message, total: int) -> list[tuple[int, bool]]:
    marked = [bp.tokens for bp in (message.holdfast.breakpoints if message.holdfast else [])]
    exact: dict[int, int] = {}
    numbers = [number for number, part in enumerate(parts) if part.ttl is not None]
    for number, tokens in zip(numbers, marked, strict=False):
        if tokens is not None:
            exact[number] = tokens
    exact[len(parts) - 1] = total
    ends: list[tuple[int, bool]] = []
    first, start = 0, 0
    for last in sorted(exact):
        group = parts[first : last + 1]
        weight, done = max(sum(len(part.text) for part in group), 1), 0
        for part in group:
            done += len(part.text)
            end = start + round((exact[last] - start) * done / weight)
            ends.append((end, len(group) == 1))
        first, start = last + 1, exact[last]
    return ends
