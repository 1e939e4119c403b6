"""Ends of leases are counted once, whoever tells them; a lease whose end nobody told is not kept.

Also: the marginal time of a token is found beneath steps that decode and prompts that are short.
"""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.reports import LEASE_ENDS, PrefillSums
from gateway.base.epochs import EpochReport
from gateway.base.token_time import added, slope
from gateway.ledger.database import Ledger
from gateway.ledger.reads.leases import Answering, leases_kept
from gateway.ledger.reads.prefill_times import token_times
from gateway.ledger.reads.sums import Range
from gateway.structs.fleet import LeasesKept
from tests.gateway.ledger.test_sums import START
from tests.gateway.records import turn_record

BEGUN_MS = int(START.timestamp() * 1000)
MINUTE_MS = 60_000
DAY = Range(since_ms=BEGUN_MS - 1, until_ms=BEGUN_MS + 86_400_000)
SILENT: Answering = {"engine-0": None}


def epoch_report(epoch: str, first: float, heard: float, **more: object) -> EpochReport:
    """Moments are minutes behind the start."""
    values = {
        "engine": "engine-0",
        "epoch": epoch,
        "model": "m",
        "device": "cpu",
        "kind": "native cpu",
        "first_ms": BEGUN_MS + int(first * MINUTE_MS),
        "heard_ms": BEGUN_MS + int(heard * MINUTE_MS),
    }
    return msgspec.convert(values | more, EpochReport)


def ended(**counts: int) -> dict[str, int]:
    return dict.fromkeys(LEASE_ENDS, 0) | counts


async def kept(ledger: Ledger, answering: Answering, of: Range = DAY) -> LeasesKept:
    return await leases_kept(ledger, of, answering)


@pytest.mark.anyio
async def test_ends_that_two_gateways_tell_count_once(ledger: Ledger) -> None:
    early = epoch_report("a", 0, 1, granted=5, ended=ended(expired=1))
    late = epoch_report("a", 0, 2, granted=9, ended=ended(expired=3, sacrificed=1))
    for report in (early, late, early, late):
        await ledger.record_epochs([report])
    leases = await kept(ledger, {"engine-0": "a"})
    assert (leases.expired, leases.lost, leases.held) == (3, {"sacrificed": 1}, 5)
    assert leases.share == 3 / 4
    first_minute = Range(since_ms=BEGUN_MS, until_ms=BEGUN_MS + 2 * MINUTE_MS)
    assert (await kept(ledger, {"engine-0": "a"}, first_minute)).expired == 1


@pytest.mark.anyio
async def test_what_its_workspace_released_is_neither_kept_nor_lost(ledger: Ledger) -> None:
    ends = ended(expired=1, dropped=1, released=2)
    await ledger.record_epochs([epoch_report("a", 0, 3, granted=5, ended=ends)])
    leases = await kept(ledger, {"engine-0": "a"})
    assert (leases.expired, leases.released, leases.lost) == (1, 2, {"dropped": 1})
    assert (leases.held, leases.share) == (1, 1 / 2)


@pytest.mark.anyio
async def test_what_a_silent_engine_held_is_not_known_since_it_was_heard(ledger: Ledger) -> None:
    await ledger.record_epochs([epoch_report("a", 0, 3, granted=2, ended=ended(expired=1))])
    leases = await kept(ledger, SILENT)
    assert (leases.not_known, leases.held, leases.lost) == (1, 0, {})
    assert leases.not_known_since_ms == BEGUN_MS + 3 * MINUTE_MS
    assert leases.share == 1 / 2, "what is not known is not kept"


@pytest.mark.anyio
async def test_what_a_store_brought_back_is_held_and_the_rest_is_lost(ledger: Ledger) -> None:
    before = epoch_report(
        "a", 0, 3, granted=7, ended=ended(expired=1), silent_ms=BEGUN_MS + 4 * MINUTE_MS
    )
    after = epoch_report("b", 90, 91, granted=3, restored_leases=3, lost_leases=2)
    await ledger.record_epochs([before, after])
    leases = await kept(ledger, {"engine-0": "b"})
    assert (leases.held, leases.lost) == (3, {"store_lost": 2, "restart": 1})
    assert leases.not_known == 0


@pytest.mark.parametrize(("gap", "is_seen"), [(0.5, True), (30, False)])
@pytest.mark.anyio
async def test_an_end_that_no_gateway_saw_is_not_known(
    ledger: Ledger, gap: float, is_seen: bool
) -> None:
    """A gateway that was down meanwhile can't say whether a lease had lived to its end."""
    await ledger.record_epochs(
        [epoch_report("a", 0, 3, granted=2), epoch_report("b", 3 + gap, 4 + gap)]
    )
    leases = await kept(ledger, {"engine-0": "b"})
    assert (leases.lost, leases.not_known) == (({"restart": 2}, 0) if is_seen else ({}, 2))
    assert leases.expired == 0


@pytest.mark.anyio
async def test_leases_of_an_engine_that_left_the_fleet_are_lost_with_it(ledger: Ledger) -> None:
    await ledger.record_epochs([epoch_report("a", 0, 3, granted=2)])
    assert (await kept(ledger, {})).lost == {"engine_lost": 2}
    later = Range(since_ms=BEGUN_MS + 10 * MINUTE_MS, until_ms=DAY.until_ms)
    assert (await kept(ledger, {}, later)).lost == {}


@pytest.mark.anyio
async def test_a_turn_tells_of_leases_when_nobody_else_can(ledger: Ledger) -> None:
    """The gateway and the engine were killed together: only the journal had the turns."""
    for number, granted in enumerate((2, 3, 1)):
        turn = turn_record(f"msg_{number:028x}", engine="engine-0", epoch="a", opened_at=START)
        turn.leases_granted = granted
        turn.outcome = "stop"
        await ledger.insert_turns([turn])
        await ledger.insert_turns([turn])
    assert (await kept(ledger, SILENT)).not_known == 3


PARTS = st.lists(st.integers(0, 5), min_size=5, max_size=5)


@given(st.lists(PARTS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_share_never_counts_what_is_not_known_as_kept(
    steps: list[list[int]], chance: random.Random
) -> None:
    expired, lost, unknown = (sum(step[place] for step in steps) for place in (0, 1, 2))
    leases = LeasesKept(
        since_ms=0,
        until_ms=1,
        expired=expired,
        lost={"restart": lost} if lost else {},
        not_known=unknown,
        not_known_since_ms=None,
        held=chance.randrange(9),
    )
    if leases.share is not None:
        assert leases.share == expired / (expired + lost + unknown)


def steps(chance: random.Random, seconds: float, number: int = 200) -> PrefillSums:
    """Steps of an engine on which a token takes so long, a step 3 ms and each choice 1 ms more."""
    sums = PrefillSums()
    for _ in range(number):
        tokens = chance.choice((0, 0, 0, 15, 15, 200, 512))
        decodes = chance.randrange(6)
        took = 0.003 + tokens * seconds + decodes * 0.001
        sums.observe(tokens, decodes, took * chance.uniform(0.97, 1.03))
    return sums


@pytest.mark.parametrize("seconds", [5e-5, 4e-4, 2e-3])
def test_the_time_of_a_token_is_found_beneath_steps_that_decode(seconds: float) -> None:
    assert slope(steps(random.Random(7), seconds)) == pytest.approx(seconds, rel=0.03)


def test_a_step_that_only_prefills_is_avoided_with_its_tokens() -> None:
    """A prompt of 4,096 tokens is eight steps of 512, each with a cost of its own."""
    sums = PrefillSums()
    for tokens in [*[512] * 80, *[15] * 300, *[0] * 50]:
        sums.observe(tokens, int(tokens == 0), 0.003 + tokens * 5e-5)
        sums.unshared_tokens += tokens
    seconds = slope(sums)
    assert seconds is not None
    assert seconds * 4096 == pytest.approx(8 * (0.003 + 512 * 5e-5), rel=0.02)


def test_sums_of_parts_are_those_of_the_whole() -> None:
    chance = random.Random(3)
    parts = [steps(chance, 5e-5) for _ in range(4)]
    whole = added(parts)
    assert whole.observations == 800
    assert slope(whole) == pytest.approx(5e-5, rel=0.03)


@pytest.mark.parametrize(
    "observations",
    [
        [],
        [(15, 0.01)] * 4,
        # All of one length: what a step costs and what a token does can't be told apart.
        [(512, 0.03)] * 50,
        # A time that has nothing to do with the tokens.
        [(tokens, 0.5 if number % 2 else 0.001) for number, tokens in enumerate(range(1, 40))],
    ],
)
def test_too_little_tells_no_time(observations: list[tuple[int, float]]) -> None:
    sums = PrefillSums()
    for tokens, took in observations:
        sums.observe(tokens, 0, took)
    assert slope(sums) is None


@pytest.mark.anyio
async def test_the_time_of_a_token_is_a_gpus_only_where_the_engine_says_so(ledger: Ledger) -> None:
    times = steps(random.Random(1), 5e-5)
    on_gpu = epoch_report("a", 0, 1, engine="gpu", device="NVIDIA H100", prefill_times=times)
    on_cpu = epoch_report("a", 0, 1, engine="cpu", prefill_times=times)
    unsaid = epoch_report("a", 0, 1, engine="unsaid", device="", prefill_times=times)
    few = epoch_report("a", 0, 1, engine="few", prefill_times=PrefillSums())
    await ledger.record_epochs([on_gpu, on_cpu, unsaid, few])
    measured = await token_times(ledger, str)
    times_of = {name: measured.of(name, "m") for name in ("gpu", "cpu", "unsaid", "few", "none")}
    assert times_of["few"] is None and times_of["none"] is None
    told_gpu = {name: time.is_gpu for name, time in times_of.items() if time is not None}
    assert told_gpu == {"gpu": True, "cpu": False, "unsaid": False}
    # An alias is the engine's only model; with two models it is neither.
    assert measured.of("gpu", "an alias") == times_of["gpu"]
    second_model = epoch_report("b", 2, 3, engine="gpu", model="other", prefill_times=times)
    await ledger.record_epochs([second_model])
    assert (await token_times(ledger, str)).of("gpu", "an alias") is None


@pytest.mark.anyio
async def test_a_later_report_with_fewer_steps_changes_nothing(ledger: Ledger) -> None:
    many = steps(random.Random(1), 5e-5)
    few = steps(random.Random(2), 9e-5, 20)
    for times in (many, few):
        await ledger.record_epochs([epoch_report("a", 0, 1, prefill_times=times)])
    time = (await token_times(ledger, str)).of("engine-0", "m")
    assert time is not None and time.seconds == slope(many)
