"""Conversations made up by a rule, for plans whose answer is known."""

import random
from dataclasses import dataclass

from engine.protocol import Ttl
from gateway.planning.traffic import Numbers, Turn


@dataclass(frozen=True, kw_only=True)
class MadeTraffic:
    """Tenants with a system prompt each, and gaps between turns.

    All conversations of a tenant begin with its `system_tokens`. Every turn adds `question_tokens`
    and the `answer_tokens` of the turn before. Gaps are exponential with a mean of `gap_seconds`.
    Conversations start at random within `hours`.
    """

    tenants: int = 8
    conversations: int = 20
    turns: int = 8
    system_tokens: int = 3000
    question_tokens: int = 300
    answer_tokens: int = 250
    gap_seconds: float = 60.0
    hours: float = 4.0
    ttl: Ttl | None = "5m"
    seed: int = 1

    @property
    def num_turns(self) -> int:
        return self.tenants * self.conversations * self.turns


def made_up(traffic: MadeTraffic) -> list[Turn]:
    chance = random.Random(traffic.seed)
    numbers = Numbers()
    turns: list[Turn] = []
    grown = traffic.question_tokens + traffic.answer_tokens
    for tenant in range(traffic.tenants):
        head = [numbers.of(tenant)] if traffic.system_tokens else []
        for talk in range(traffic.conversations):
            at = chance.uniform(0, traffic.hours * 3600)
            for number in range(traffic.turns):
                tail = [numbers.of((tenant, talk, n)) for n in range(number + 1)]
                ends = [traffic.system_tokens] * len(head)
                first = traffic.system_tokens + traffic.question_tokens
                ends += [first + n * grown for n in range(number + 1)]
                ttl = traffic.ttl
                marks = [] if ttl is None else [(place, ttl) for place in {0, len(ends) - 1}]
                turns.append(
                    Turn(
                        at=at,
                        scope=tenant,
                        ids=head + tail,
                        ends=ends,
                        segments=list(range(len(ends))),
                        marks=sorted(marks),
                        output=traffic.answer_tokens,
                    )
                )
                at += chance.expovariate(1 / traffic.gap_seconds)
    return sorted(turns, key=lambda turn: turn.at)
