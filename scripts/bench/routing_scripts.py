"""The conversations of scripts.bench.routing, drawn by seed.

- *tenants*: conversations of 8 turns; each tenant has a system text of 8 KB of its own.
- *parting*: short conversations; the system texts of four groups of tenants share 7,168 characters
  and differ then inside the same block.
- *sessions*: agents' sessions of 8 to 20 turns, whose tool results have 0.8 to 6 KB, and as many
  single questions about a pasted text as there are turns of sessions. The system texts are those of
  *parting*.
"""

import random
from dataclasses import dataclass
from typing import Literal

Shape = Literal["tenants", "parting", "sessions"]
SHAPES: tuple[Shape, ...] = ("tenants", "parting", "sessions")
Script = tuple[str, list[str]]
"""A conversation: its system text, and its questions."""

SYSTEM_BYTES = 8192
QUESTION_BYTES = 1600
SHARED_BYTES = 7168
NUM_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Workload:
    tenants: int = 24
    conversations: int = 6
    turns: int = 8
    in_flight: int = 24
    max_tokens: int = 2
    seed: int = 1
    shape: Shape = "tenants"

    def scripts(self) -> list[Script]:
        """All conversations, in the order in which they begin."""
        draw = random.Random(self.seed)
        if self.shape == "tenants":
            scripts = self._tenants(draw)
        elif self.shape == "parting":
            scripts = self._parting(draw)
        else:
            scripts = self._sessions(draw)
        draw.shuffle(scripts)
        return scripts

    def _tenants(self, draw: random.Random) -> list[Script]:
        scripts: list[Script] = []
        for _ in range(self.tenants):
            system = _prose(draw, SYSTEM_BYTES)
            for _ in range(self.conversations):
                scripts.append((system, [_prose(draw, QUESTION_BYTES) for _ in range(self.turns)]))
        return scripts

    def _parting(self, draw: random.Random) -> list[Script]:
        turns = max(self.turns // 4, 1)
        return [
            (system, [_prose(draw, QUESTION_BYTES) for _ in range(turns)])
            for system in _parted(draw, self.tenants)
            for _ in range(self.conversations)
        ]

    def _sessions(self, draw: random.Random) -> list[Script]:
        """As many sessions as tenants, each with a tenant's system text."""
        systems = _parted(draw, self.tenants)
        scripts: list[Script] = []
        for system in systems:
            turns = draw.randint(self.turns, 5 * self.turns // 2)
            sizes = [draw.randint(800, 6000) for _ in range(turns)]
            scripts.append((system, [_prose(draw, size) for size in sizes]))
        num_singles = sum(len(questions) for _, questions in scripts)
        for _ in range(num_singles):
            scripts.append((draw.choice(systems), [_prose(draw, draw.randint(1000, 16_000))]))
        return scripts


def _parted(draw: random.Random, number: int) -> list[str]:
    """System texts of 8 to 12 KB in NUM_GROUPS groups; those of a group begin alike."""
    groups = [_prose(draw, SHARED_BYTES) for _ in range(NUM_GROUPS)]
    return [
        groups[index % NUM_GROUPS] + _prose(draw, draw.randint(1024, 5120))
        for index in range(number)
    ]


def _prose(draw: random.Random, num_bytes: int) -> str:
    words = []
    size = 0
    while size <= num_bytes:
        words.append(f"{draw.getrandbits(24):06x}"[: draw.randint(2, 6)])
        size += len(words[-1]) + 1
    return " ".join(words)[:num_bytes]
