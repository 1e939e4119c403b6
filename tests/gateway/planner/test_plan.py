"""Plans: what they say of traffic whose answer is known, and of what can't be planned."""

from typing import Any

import pytest

from gateway.admin.structs.advice import Plan
from gateway.base.errors import InvalidRequest
from gateway.planner.plan import plan
from gateway.planning.traffic import Job, MadeTraffic, PlanRequest, made_up

MADE = MadeTraffic(tenants=2, conversations=6, turns=5, hours=0.1, gap_seconds=20, seed=2)
CONFIG = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
}


def planned(**asked: Any) -> Plan:
    given = {"made": MADE, "device_gib": 2.0, "weights_gib": 0.0, **asked}
    return plan(Job(asked=PlanRequest(**given)), lambda share: None)


def ideal(made: MadeTraffic) -> float:
    """All of a prompt that an earlier one had, of a cache that loses nothing."""
    seen, read, total = set[int](), 0, 0
    for turn in made_up(made):
        total += turn.ends[-1]
        known = [end for number, end in zip(turn.ids, turn.ends, strict=True) if number in seen]
        read += max(known, default=0)
        seen.update(turn.ids)
    return read / total


def test_enough_memory_reads_all_that_there_is_and_keeps_every_promise() -> None:
    found = planned(device_gib=200.0)
    # Two cold twins at most compute what a cache that loses nothing would have had.
    assert found.whole.reuse_rate == pytest.approx(ideal(MADE), abs=0.01)
    assert found.ceiling == pytest.approx(ideal(MADE), abs=0.01)
    assert found.whole.promise_kept == 1.0 and found.whole.leases_ended > 0
    assert found.whole.refused == 0 and found.whole.turns == MADE.num_turns


def test_less_memory_reads_less_and_every_tier_adds() -> None:
    found = planned(device_gib=1.5, host_gib=1.5, disk_gib=20.0)
    rates = [point.reuse_rate for point in found.memory]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    tiers = {point.label: point.reuse_rate for point in found.tiers}
    assert tiers["Device alone"] < tiers["With host and disk"]
    assert tiers["With host and disk"] == pytest.approx(ideal(MADE), abs=0.03)


def test_int8_is_twice_the_memory() -> None:
    found = planned(device_gib=1.0)
    by = {change.kind: change.after for change in found.buys}
    assert by["int8"].device_tokens == 2 * found.whole.device_tokens
    assert by["int8"].hit_rate == pytest.approx(by["memory"].hit_rate, abs=1e-9)
    assert planned(kv_dtype="int8").kv.bytes_per_token * 2 == found.kv.bytes_per_token


def test_the_first_token_waits_for_its_prefill_alone_on_an_idle_engine() -> None:
    alone = MadeTraffic(tenants=1, conversations=1, turns=1, system_tokens=0, question_tokens=800)
    found = planned(made=alone, prefill_us=100.0, device_gib=8.0)
    assert found.whole.first_token_p50 == pytest.approx(0.08)


def test_sizes_of_a_pasted_config_are_those_of_its_family() -> None:
    ours = planned(config=CONFIG, device_gib=40.0, weights_gib=None).kv
    family = planned(model="llama-3-8b", device_gib=40.0, weights_gib=None).kv
    assert ours.bytes_per_token == family.bytes_per_token == 131_072
    assert ours.weights_gib == pytest.approx(family.weights_gib, rel=0.05)
    half = ours.device_tokens // 2
    assert ours.lease_tokens and ours.leases_that_fit == half // ours.lease_tokens


@pytest.mark.parametrize(
    "asked, named",
    [
        ({"model": "gpt-9"}, "model: no family 'gpt-9'"),
        ({"config": {**CONFIG, "num_hidden_layers": None}}, "config: num_hidden_layers"),
        ({"config": {**CONFIG, "kv_lora_rank": 512}}, "config: qk_rope_head_dim"),
        ({"config": {**CONFIG, "ssm_state_size": 16}}, "state-space layers"),
        ({"config": {**CONFIG, "vocab_size": "x"}, "weights_gib": None}, "config: vocab_size"),
        ({"config": {}}, "config: num_hidden_layers"),
        ({"device_gib": 10.0, "weights_gib": None, "model": "llama-3-70b"}, "device_gib"),
        ({"made": None}, "since_ms: no request of this range"),
        ({"made": None, "trace": ""}, "trace: it has no request"),
        ({"made": None, "trace": "{}"}, "trace: line 1"),
        ({"made": MadeTraffic(tenants=1000, conversations=1000)}, "made: 8,000,000 turns"),
        ({"made": MadeTraffic(tenants=10, conversations=6, turns=1000)}, "made.turns"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_field(asked: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned(**asked)
    assert named in str(refused.value)
