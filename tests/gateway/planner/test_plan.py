"""Plans: what they say of traffic whose answer is known, and of what can't be planned."""

from typing import Any

import msgspec
import pytest

from gateway.base.errors import InvalidRequest
from gateway.planner.plan import at_rate, fewest, plan
from gateway.planning.traffic import (
    GpuChoice,
    Job,
    MadeTraffic,
    MeasuredOn,
    PlanRequest,
    Target,
    known_gpus,
    made_up,
)
from gateway.structs.advice import Plan

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


@pytest.mark.parametrize("enough", range(1, 65))
@pytest.mark.parametrize("guess", [0, 1, 5, 64, 900])
def test_the_fewest_are_found_from_any_guess_in_few_simulations(enough: int, guess: int) -> None:
    tried = list[int]()

    def reaches(engines: int) -> bool:
        tried.append(engines)
        return engines >= enough

    assert fewest(reaches, guess, 64) == enough
    assert len(tried) == len(set(tried)) <= 13


def test_no_number_reaches_what_the_most_do_not() -> None:
    assert fewest(lambda engines: False, 3, 64) is None


CROWD = MadeTraffic(
    tenants=4,
    conversations=6,
    turns=3,
    question_tokens=3000,
    answer_tokens=20,
    hours=0.002,
    gap_seconds=5,
    seed=3,
)
TINY = MadeTraffic(tenants=1, conversations=2, turns=2, hours=0.02, gap_seconds=10)


def answered(**asked: Any) -> Plan:
    given = {"made": TINY, "device_gib": 80.0, "weights_gib": None, **asked}
    return planned(**given)


def test_a_target_is_answered_by_the_fewest_engines_of_each_gpu_the_cheapest_first() -> None:
    gpus = [GpuChoice(name=name) for name in ("h100", "l40s")]
    target = Target(first_token_p95=1.5, promise_kept=0.9)
    found = answered(made=CROWD, target=target, gpus=gpus)
    reached = [each for each in found.answers if each.engines]
    prices = [each.per_hour for each in reached]
    assert prices == sorted(prices) and {each.gpu for each in reached} == {"h100", "l40s"}
    first = reached[0]
    assert first.title in found.answer_text and f"{first.engines} engine" in found.answer_text
    assert found.whole.engines == first.engines and found.whole.first_token_p95 <= 1.5
    for each in reached:
        assert each.point and each.point.first_token_p95 <= 1.5 and each.point.refused == 0
        assert each.per_hour == pytest.approx(
            (each.engines or 0) * each.gpus_per_engine * known_gpus()[each.gpu].per_hour
        )
    # One engine less does not reach it.
    several = next(each for each in reached if (each.engines or 0) > 1)
    fewer = answered(
        made=CROWD,
        device_gib=several.device_gib,
        engines=(several.engines or 0) - 1,
        prefill_us=several.prefill_us,
        decode_ms=several.decode_ms,
    )
    assert fewer.whole.first_token_p95 > 1.5


def test_a_gpus_times_are_measured_given_or_estimated_and_say_so() -> None:
    gpus = [
        GpuChoice(name="h100", per_hour=9.0),
        GpuChoice(name="h200"),
        GpuChoice(name="b200", per_hour=9.5, prefill_us=11.0, decode_ms=5.0),
    ]
    target = Target(first_token_p95=30.0)
    by = {each.gpu: each for each in answered(target=target, gpus=gpus).answers}
    assert by["h100"].is_measured and by["h100"].speed.startswith("Measured: the native engine")
    assert by["h100"].prefill_us == 42.0 and by["h100"].per_hour == 9.0
    # 2 x 8.0e9 operations at 40 % of 989e12 a second.
    assert by["h200"].speed.startswith("Estimated from NVIDIA's H200 data sheet")
    assert by["h200"].prefill_us == pytest.approx(40.4, abs=0.1)
    assert by["b200"].prefill_us == 11.0 and by["b200"].speed == "As given"
    # Experts that do not compute a token take memory and no time.
    (sparse,) = answered(
        model="qwen3-30b-a3b", target=target, gpus=[GpuChoice(name="h200")]
    ).answers
    assert sparse.prefill_us == pytest.approx(2 * 3.3e9 / (0.4 * 989e12) * 1e6, rel=1e-3)


def test_a_model_too_large_for_one_gpu_takes_a_group_of_them() -> None:
    gpus = [GpuChoice(name="l4"), GpuChoice(name="h100")]
    found = answered(model="llama-3-70b", target=Target(first_token_p95=60.0), gpus=gpus).answers
    by = {each.gpu: each for each in found}
    assert by["h100"].gpus_per_engine == 4 and by["h100"].engines == 1
    assert by["l4"].gpus_per_engine == 8 or by["l4"].engines is None


def test_more_requests_a_second_are_more_tenants_at_the_same_pace() -> None:
    turns = made_up(CROWD)
    rate = len(turns) / (turns[-1].at - turns[0].at)
    many, told = at_rate(turns, 3 * rate)
    assert len(many) == 3 * len(turns) and told is not None
    assert len({turn.scope for turn in many}) == 3 * len({turn.scope for turn in turns})
    assert not {turn.ids[0] for turn in many[:1]} - {number for t in many for number in t.ids}
    found = len(many) / (many[-1].at - many[0].at)
    assert found == pytest.approx(3 * rate, rel=0.05)
    slow, _ = at_rate(turns, rate / 4)
    assert slow[-1].at - slow[0].at == pytest.approx(4 * (turns[-1].at - turns[0].at), rel=0.01)
    assert at_rate(turns, None) == (turns, None)


def test_times_of_another_model_or_device_are_warned_of() -> None:
    demo = MeasuredOn(model="holdfast-demo", device="cpu", kv_bytes_per_token=3_072)
    asked = PlanRequest(made=MADE)
    found = plan(Job(asked=asked, prefill_us=900.0, measured_on=[demo]), lambda share: None)
    (warning,) = found.warnings
    assert "measured with holdfast-demo (3,072 bytes a token) on a CPU" in warning
    assert "llama-3-8b (131,072 bytes a token) on 80 GiB" in warning
    same = MeasuredOn(model="Llama-3-8B", device="NVIDIA H100", kv_bytes_per_token=131_072)
    right = plan(Job(asked=asked, prefill_us=42.0, measured_on=[same]), lambda share: None)
    given = msgspec.structs.replace(asked, prefill_us=42.0)
    own = plan(Job(asked=given, prefill_us=900.0, measured_on=[demo]), lambda share: None)
    assert right.warnings == own.warnings == []


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
        ({"gpus": [GpuChoice(name="l4")]}, "gpus: they are compared by"),
        ({"target": Target(first_token_p95=1.0), "prefill_us": 5.0}, "prefill_us: with a target"),
        (
            {"target": Target(first_token_p95=1.0), "gpus": [GpuChoice(name="x")]},
            "gpus: no GPU 'x' is known: l4, ",
        ),
        (
            {
                "model": "llama-3-405b",
                "weights_gib": None,
                "target": Target(first_token_p95=1.0),
                "gpus": [GpuChoice(name="l4")],
            },
            "target: no fleet of these GPUs reaches it. NVIDIA L4: 8 of it have no room",
        ),
        ({"made": MadeTraffic(tenants=10, conversations=6, turns=1000)}, "made.turns"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_its_field(asked: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        planned(**asked)
    assert named in str(refused.value)
