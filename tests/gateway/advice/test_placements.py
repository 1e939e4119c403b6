"""The ways to place markers, against the gateway's own automatic caching."""

import random

import pytest

from engine.protocol import Message, Prompt, TextPart
from gateway.admin.structs.fleet import AutoCacheMode, AutoCacheTtl
from gateway.advice.placements import Place, Placement, placements_for
from gateway.base.grants import AutoCache
from gateway.prompt.breakpoints import Slot, add_automatic
from gateway.prompt.names import THINKING
from gateway.prompt.sketch import kinds_of
from tests.gateway.advice.shapes import Sent
from tests.gateway.advice.turns import random_prompt, turns_of

WAYS: dict[tuple[AutoCacheMode, AutoCacheTtl], Placement] = {
    ("prefix", "5m"): Placement("", Place("system", -1), "5m"),
    ("prefix", "1h"): Placement("", Place("system", -1), "1h"),
    ("conversation", "5m"): Placement("", Place("system", -1), "5m", "5m"),
    ("conversation", "1h"): Placement("", Place("system", -1), "1h", "1h"),
}


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("mode, ttl", WAYS)
def test_a_policy_and_its_way_mark_the_same_blocks(
    mode: AutoCacheMode, ttl: AutoCacheTtl, seed: int
) -> None:
    prompt = random_prompt(random.Random(seed))
    if not prompt.system:
        prompt.system.append(TextPart("s"))
    slots = [
        Slot(path=str(n), can_carry=kind.lower() != THINKING)
        for n, kind in enumerate(kinds_of(prompt))
    ]
    expected = add_automatic(prompt, slots, [], AutoCache(mode, ttl))
    (turn,) = turns_of([Sent(0, prompt)])
    marks = WAYS[mode, ttl].marks(turn)
    assert [(p.segment, p.ttl) for p in expected] == marks


def test_a_longer_ttl_never_comes_after_a_shorter_one() -> None:
    for seed in range(100):
        (turn,) = turns_of([Sent(0, random_prompt(random.Random(seed)))])
        way = Placement("", Place("messages", 3), "1h", "5m")
        ttls = [ttl for _, ttl in way.marks(turn)]
        assert ttls == sorted(ttls) and len(ttls) <= 4


def test_examples_in_front_of_the_question_are_a_shared_beginning() -> None:
    shots = [Message("user", [TextPart(f"example {n} " * 50) for n in range(4)])]
    sent = [
        Sent(n * 1000, Prompt([Message("user", [*shots[0].parts, TextPart(f"question {n}")])]))
        for n in range(6)
    ]
    ways = placements_for(turns_of(sent))
    assert Place("messages", 3) in {way.shared for way in ways}
