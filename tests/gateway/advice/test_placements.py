"""The ways to place markers, against the gateway's own automatic caching."""

import random

import pytest

from engine.protocol import TextPart
from gateway.advice.placements import Place, Placement
from gateway.base.grants import AutoCache
from gateway.prompt.names import THINKING
from gateway.prompt.plan import add_automatic
from gateway.prompt.sketch import kinds_of
from gateway.prompt.slots import Slot
from gateway.structs.fleet import AutoCacheMode, AutoCacheTtl
from tests.gateway.advice.shapes import Sent, random_prompt, turns_of


@pytest.mark.parametrize("ttl", ["5m", "1h"])
@pytest.mark.parametrize("mode", ["prefix", "conversation"])
def test_a_policy_and_its_way_mark_the_same_blocks(mode: AutoCacheMode, ttl: AutoCacheTtl) -> None:
    way = Placement("", Place("system", -1), ttl, ttl if mode == "conversation" else None)
    for seed in range(40):
        prompt = random_prompt(random.Random(seed))
        if not prompt.system:
            prompt.system.append(TextPart("s"))
        slots = [
            Slot(path=str(n), can_carry=kind.lower() != THINKING)
            for n, kind in enumerate(kinds_of(prompt))
        ]
        expected = add_automatic(prompt, slots, [], AutoCache(mode, ttl))
        (turn,) = turns_of([Sent(0, prompt)])
        assert [(p.segment, p.ttl) for p in expected] == way.marks(turn), seed
