"""Where a prompt is placed: cost, load, and agreement without talking."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import ChainHeld, HeldName, Snapshot, Tier
from gateway.routing import router
from gateway.routing.held import Ends, Holdings, PrefixIndex
from gateway.routing.router import Load, PromptSizes, Route, Weights

WEIGHTS = Weights()
NOW = 10.0
SIZES = [1000, 2000, 4000, 8000]


def prompt(name: str = "p", affinity: str | None = None) -> PromptSizes:
    ends = Ends([f"{name}.{i}" for i in range(len(SIZES))], SIZES)
    return PromptSizes(ends=ends, tokens=SIZES[-1], affinity=affinity)


@dataclass
class Engine:
    seed: int
    num_names: int
    chain: ChainHeld
    load: Load = field(default_factory=lambda: Load(WEIGHTS.fade_seconds))
    holdings: Holdings = field(init=False)
    heard_at: float = NOW


def place(sizes: PromptSizes, engines: list[Engine], weights: Weights, now: float) -> Route[Engine]:
    """As a gateway that has heard of these engines."""
    index = PrefixIndex()
    for member in engines:
        member.holdings = Holdings(index)
        chains = [member.chain] if member.num_names else []
        member.holdings.apply(Snapshot(seq=1, epoch="e", chains=chains), member.heard_at)
    return router.place(sizes, engines, weights, now)


def engine(
    number: int, depth: int = 0, *, name: str = "p", tier: Tier = "device", num_leased: int = 0
) -> Engine:
    names = [HeldName(f"{name}.{i}", SIZES[i]) for i in range(depth)]
    seconds = 300 if num_leased else None
    chain = ChainHeld(seq=1, names=names, tier=tier, num_leased=num_leased, lease_seconds=seconds)
    return Engine(number, depth, chain)


@given(st.lists(st.integers(0, len(SIZES)), min_size=1, max_size=6))
def test_among_idle_engines_the_one_that_holds_most_takes_it(depths: list[int]) -> None:
    engines = [engine(number, depth) for number, depth in enumerate(depths)]
    placement = place(prompt(), engines, WEIGHTS, NOW)
    most = SIZES[max(depths) - 1] if max(depths) else 0
    assert placement.available.held == placement.captured.held == most
    assert placement.to_prefill == SIZES[-1] - most


def test_a_lease_goes_before_content_that_may_go_and_device_before_host() -> None:
    for engines, chosen in (
        ([engine(0, 4), engine(1, 4, num_leased=4), engine(2, 4)], 1),
        ([engine(0, 3, tier="host"), engine(1, 3)], 1),
        ([engine(0, 3, tier="host"), engine(1)], 0),
    ):
        assert place(prompt(), engines, WEIGHTS, NOW).engine.seed == chosen


def test_what_a_shared_store_has_counts_for_every_engine_less_than_what_is_at_hand() -> None:
    """One engine wrote the prefix and still has it; two can read it; one knows nothing of it."""
    overloaded = [engine(0, 4), engine(1, 3), engine(2)]
    engines = [engine(0), engine(1, 4, tier="disk"), engine(2, 4), engine(3, 4, tier="disk")]
    placement = place(prompt(), engines, WEIGHTS, NOW)
    assert placement.engine.seed == 2
    alone = [place(prompt(), [member], WEIGHTS, NOW) for member in engines]
    assert [cost.to_prefill for cost in alone] == [SIZES[-1], 0, 0, 0]
    for number in range(40):
        engines[2].load.assign(f"t{number}", 8000, NOW)
        overloaded[0].load.assign(f"t{number}", 8000, NOW)
    placement = place(prompt(), engines, WEIGHTS, NOW)
    assert placement.engine.seed in (1, 3)
    costs = [place(prompt(), [member], WEIGHTS, NOW).cost for member in engines]
    assert costs[1] == costs[3] < min(costs[0], costs[2])
    chosen = place(prompt(), overloaded, WEIGHTS, NOW).engine
    assert chosen.seed == 1, "which holds most of the lighter"


def test_unknown_prefixes_spread_and_every_gateway_chooses_the_same() -> None:
    engines = [engine(number) for number in range(4)]
    in_reverse = list(reversed([engine(number) for number in range(4)]))
    chosen = Counter[int]()
    for number in range(200):
        here = place(prompt(f"p{number}"), engines, WEIGHTS, NOW).engine.seed
        there = place(prompt(f"p{number}"), in_reverse, WEIGHTS, NOW).engine.seed
        assert here == there
        chosen[here] += 1
    assert len(chosen) == 4 and max(chosen.values()) < 100


ACTS = st.sampled_from(["assign", "started", "ended", "returned"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 5), st.integers(0, 9000)), max_size=60))
def test_whatever_way_turns_end_no_load_is_left_over(steps: list[tuple[str, int, int]]) -> None:
    load = Load(600.0)
    waiting: dict[str, int] = {}
    for act, number, tokens in steps:
        turn = f"t{number}"
        if act == "assign":
            if turn not in waiting:
                load.assign(turn, tokens, NOW)
                waiting[turn] = tokens
        elif act == "started":
            load.started(turn, tokens, NOW)
            waiting.pop(turn, None)
        else:
            waiting.pop(turn, None)
            load.ended(turn) if act == "ended" else load.returned(turn, NOW)
        assert load.num_waiting_tokens == sum(waiting.values())
        assert load.recent(NOW) >= 0
    for number in range(6):
        load.ended(f"t{number}")
    assert load.num_running == load.num_waiting_tokens == 0
