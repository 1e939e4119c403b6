"""The advisor's cache against the reference model of the contract."""

import random

import pytest

from engine.protocol import Message, Prompt, TextPart, Ttl
from gateway.advice.cache import Cache
from gateway.advice.observation import Mark, Observation
from tests.conformance.oracle import B
from tests.conformance.oracle import Cache as Oracle
from tests.gateway.advice.shapes import Sent, random_prompt, turns_of

KINDS = {"h": "thinking", "c": "tool_use", "o": "tool_result"}
MINIMUM = 100


def blocks_of(turn: Observation, marks: list[Mark]) -> list[B]:
    ttls = dict(marks)
    message = -1
    blocks = []
    before = 0
    for place, letter in enumerate(turn.kinds):
        message += letter.isupper()
        section = "tools" if letter == "t" else "system" if letter == "s" else "messages"
        block_id = f"{turn.segments[place].digest.hex()} {letter.lower()}"
        size = turn.tokens[place] - before
        before = turn.tokens[place]
        kind = KINDS.get(letter.lower(), "text")
        blocks.append(B(section, block_id, size, ttls.get(place), kind, message))
    return blocks


def random_marks(turn: Observation, chance: random.Random) -> list[Mark]:
    """At most four, the longer TTL first, none on thinking."""
    places = [n for n, letter in enumerate(turn.kinds) if letter.lower() != "h"]
    chosen = sorted(chance.sample(places, min(len(places), chance.randint(0, 4))))
    hours = chance.randint(0, len(chosen))
    ttl: list[Ttl] = ["1h"] * hours + ["5m"] * (len(chosen) - hours)
    return list(zip(chosen, ttl, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_every_turn_is_billed_as_the_reference_model_bills_it(seed: int) -> None:
    chance = random.Random(seed)
    requests = []
    now = 0
    prompts = [random_prompt(chance) for _ in range(4)]
    for _ in range(30):
        now += chance.choice([0, 500, 20_000, 280_000, 320_000, 3_500_000, 3_700_000])
        requests.append(Sent(now, chance.choice([*prompts, random_prompt(chance)])))
    cache = Cache(MINIMUM)
    oracle = Oracle(MINIMUM)
    for turn in turns_of(requests, begins_after_ms=chance.choice([0, 700]), dialect="anthropic"):
        marks = random_marks(turn, chance)
        counts = cache.take(turn, marks)
        tail = turn.total - turn.tokens[-1]
        seconds = turn.at_ms / 1000
        begin = turn.begun_ms / 1000
        expected = oracle.run(blocks_of(turn, marks), t=seconds, begin=begin, g=tail)
        tokens = dict(
            inp=counts.input_tokens,
            read=counts.cache_read_tokens,
            w5=counts.writes["5m"],
            w1=counts.writes["1h"],
        )
        assert tokens == expected


def test_the_window_ends_twenty_positions_back_but_for_openais() -> None:
    def talk(count: int) -> Prompt:
        return Prompt([Message("user", [TextPart(f"{n} " * 300) for n in range(count)])])

    for count, is_read in ((34, True), (35, False)):
        for dialect in ("anthropic", "openai", "responses"):
            turns = turns_of([Sent(0, talk(15)), Sent(1000, talk(count))], dialect=dialect)
            cache = Cache(MINIMUM)
            cache.take(turns[0], [(14, "5m")])
            counts = cache.take(turns[1], [(count - 1, "5m")])
            assert bool(counts.cache_read_tokens) == (is_read or dialect != "anthropic")
