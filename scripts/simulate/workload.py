"""Conversations made up from a seed: many that share a system prompt, and sessions."""

import random

SHAPES = ("tenants", "parting", "sessions")
TENANTS = 24
CONVERSATIONS = 6
TURNS = 8
SYSTEM_BYTES = 8192
QUESTION_BYTES = 1600
SHARED_BYTES = 7168
NUM_GROUPS = 4
Talk = tuple[str, list[str]]
"""A conversation: its system text, and its questions."""


def conversations(shape: str, seed: int) -> list[Talk]:
    """All conversations of one of SHAPES, in the order in which they begin.

    `tenants`: each has a system text and conversations. `parting`: system texts begin alike,
    conversations are short. `sessions`: as many as tenants, and single questions.
    """
    draw = random.Random(seed)
    talks: list[Talk] = []
    if shape == "sessions":
        systems = _parted(draw)
        for system in systems:
            turns = draw.randint(TURNS, 5 * TURNS // 2)
            sizes = [draw.randint(800, 6000) for _ in range(turns)]
            talks.append((system, [_prose(draw, size) for size in sizes]))
        for _ in range(sum(len(questions) for _, questions in talks)):
            talks.append((draw.choice(systems), [_prose(draw, draw.randint(1000, 16_000))]))
    else:
        turns = TURNS // 4 if shape == "parting" else TURNS
        parted = _parted(draw) if shape == "parting" else None
        for tenant in range(TENANTS):
            system = parted[tenant] if parted else _prose(draw, SYSTEM_BYTES)
            for _ in range(CONVERSATIONS):
                talks.append((system, [_prose(draw, QUESTION_BYTES) for _ in range(turns)]))
    draw.shuffle(talks)
    return talks


class Pieces:
    """Numbers pieces of texts: the same piece behind the same pieces has the same number."""

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._numbers: dict[tuple[int, str], int] = {}

    def append(self, chain: list[int], text: str) -> None:
        """Add the numbers of a text's pieces to those of what stands before it."""
        for start in range(0, len(text), self._size):
            before = chain[-1] if chain else 0
            piece = text[start : start + self._size]
            chain.append(self._numbers.setdefault((before, piece), len(self._numbers) + 1))


def _parted(draw: random.Random) -> list[str]:
    """System texts of 8 to 12 KB in NUM_GROUPS groups; those of a group begin alike."""
    groups = [_prose(draw, SHARED_BYTES) for _ in range(NUM_GROUPS)]
    return [
        groups[index % NUM_GROUPS] + _prose(draw, draw.randint(1024, 5120))
        for index in range(TENANTS)
    ]


def _prose(draw: random.Random, num_bytes: int) -> str:
    words = []
    size = 0
    while size <= num_bytes:
        words.append(f"{draw.getrandbits(24):06x}"[: draw.randint(2, 6)])
        size += len(words[-1]) + 1
    return " ".join(words)[:num_bytes]
