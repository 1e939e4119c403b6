"""What became of each token of the playground's prompt. Pure."""

from collections.abc import Sequence
from typing import Any

from dashboard.playground.answer import Message, TokenUsage
from dashboard.playground.blocks import Block

READ, FIVE, HOUR = "Read from cache", "Written, 5 minutes", "Written, 1 hour"
AUTOMATIC, UNCACHED = "Automatically reused", "Uncached"
CLASSES = (READ, FIVE, HOUR, AUTOMATIC, UNCACHED)


def prompt_spans(usage: TokenUsage, automatic_tokens: int = 0) -> list[dict[str, Any]]:
    """The prompt from its first token to its last, by class.

    Tokens that were read come first, then those that were written, then those that were in memory
    all the same, then the rest. Longer TTLs come first: the contract asks for that order.
    """
    creation = usage.cache_creation
    written = creation.ephemeral_5m_input_tokens + creation.ephemeral_1h_input_tokens
    automatic = min(max(automatic_tokens - written, 0), usage.input_tokens)
    counts = {
        READ: usage.cache_read_input_tokens,
        HOUR: creation.ephemeral_1h_input_tokens,
        FIVE: creation.ephemeral_5m_input_tokens,
        AUTOMATIC: automatic,
        UNCACHED: usage.input_tokens - automatic,
    }
    start, rows = 0, []
    for name, tokens in counts.items():
        if tokens:
            rows.append({"class": name, "start": start, "end": start + tokens, "tokens": tokens})
            start += tokens
    return rows


def part_rows(blocks: Sequence[Block], message: Message) -> list[dict[str, Any]]:
    """Each block of the prompt with its tokens by class, and where it ends.

    The engine tells where marked blocks end. Between two ends tokens are divided among the blocks
    by their length in characters; `is_exact` is false for these.
    """
    automatic = message.holdfast.automatic_tokens if message.holdfast else 0
    spans = prompt_spans(message.usage, automatic)
    total = spans[-1]["end"] if spans else 0
    known = _ends(blocks, message, total)
    rows, start = [], 0
    for block, (end, is_exact, ends_exactly) in zip(blocks, known, strict=True):
        row: dict[str, Any] = {
            "part": block,
            "tokens": end - start,
            "end": end,
            "is_exact": is_exact,
            "ends_exactly": ends_exactly,
        }
        for span in spans:
            overlap = min(end, span["end"]) - max(start, span["start"])
            if overlap > 0:
                row[span["class"]] = overlap
        rows.append(row)
        start = end
    return rows


def elsewhere_rows(blocks: Sequence[Block], message: Message) -> list[dict[str, Any]]:
    """What a second send would read, had the last marker stood at the end of each block."""
    rows = part_rows(blocks, message)
    total = rows[-1]["end"] if rows else 0
    return [
        {
            "Marker at the end of": f"{number}. {row['part'].name}",
            "A second send reads": row["end"],
            "Of the prompt": row["end"] / total if total else None,
            "Computes again": total - row["end"],
            "Known": "exactly" if row["ends_exactly"] else "about",
            "Marked now": row["part"].ttl or "no",
        }
        for number, row in enumerate(rows, 1)
    ]


def _ends(blocks: Sequence[Block], message: Message, total: int) -> list[tuple[int, bool, bool]]:
    """Where each block ends; whether its tokens, and whether its end, are known exactly."""
    marked = [bp.tokens for bp in (message.holdfast.breakpoints if message.holdfast else [])]
    exact: dict[int, int] = {}
    numbers = [number for number, block in enumerate(blocks) if block.ttl is not None]
    for number, tokens in zip(numbers, marked, strict=False):
        if tokens is not None:
            exact[number] = tokens
    exact[len(blocks) - 1] = total
    ends: list[tuple[int, bool, bool]] = []
    first, start = 0, 0
    for last in sorted(exact):
        group = blocks[first : last + 1]
        weight, done = max(sum(len(block.text) for block in group), 1), 0
        for block in group:
            done += len(block.text)
            end = start + round((exact[last] - start) * done / weight)
            ends.append((end, len(group) == 1, block is group[-1]))
        first, start = last + 1, exact[last]
    return ends
