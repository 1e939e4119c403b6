"""The residency index against a model, and against the engine's own event log."""

import asyncio
import tracemalloc
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.reports import EventLog
from engine.protocol import (
    ChainGone,
    ChainHeld,
    Event,
    EventFrame,
    Heartbeat,
    HeldName,
    LeaseEnded,
    Snapshot,
    Tier,
)
from gateway.routing.held import (
    BYTES_PER_NAME,
    NEAR_NAMES,
    NOTHING,
    STALE_SECONDS,
    Copied,
    Coverage,
    Ends,
    Holdings,
    PrefixIndex,
)

LEASE_SECONDS = 300.0
CHAINS = 3
DEPTH = 5


def chain_of(chain: int, depth: int, seq: int = 0, **changes: Any) -> ChainHeld:
    names = [HeldName(f"{chain}.{i}", (i + 1) * 16) for i in range(depth)]
    return ChainHeld(seq=seq, names=names, **changes)


def ends_of(chain: int, depth: int = DEPTH) -> Ends:
    return Ends([f"{chain}.{i}" for i in range(depth)], [(i + 1) * 16 for i in range(depth)])


class Model:
    """What an engine holds, in the plainest words: name to tier, and which are leased."""

    def __init__(self) -> None:
        self.tier: dict[str, Tier] = {}
        self.leased: set[str] = set()

    def take(self, event: Event) -> None:
        match event:
            case ChainHeld():
                for index, name in enumerate(event.names):
                    self.tier[name.digest] = event.tier
                    if index < event.num_leased:
                        self.leased.add(name.digest)
            case ChainGone():
                for digest in event.names:
                    self.tier.pop(digest, None)
                    self.leased.discard(digest)
            case LeaseEnded():
                self.leased.difference_update(event.names)

    def snapshot(self, seq: int, epoch: str) -> Snapshot:
        chains = [
            ChainHeld(
                seq=seq,
                names=[HeldName(digest, 16)],
                tier=tier,
                num_leased=int(digest in self.leased),
                lease_seconds=LEASE_SECONDS if digest in self.leased else None,
            )
            for digest, tier in self.tier.items()
        ]
        return Snapshot(seq=seq, epoch=epoch, chains=chains)

    def coverage(self, ends: Ends) -> Coverage:
        sized = list(zip(ends.digests, ends.lengths, strict=True))
        num_held = max((size for name, size in sized if name in self.tier), default=0)
        device = max((size for name, size in sized if self.tier.get(name) == "device"), default=0)
        leased = max((size for name, size in sized if name in self.leased), default=0)
        above = (size for name, size in sized if self.tier.get(name) in ("device", "host"))
        in_memory = max(above, default=0)
        return Coverage(device, in_memory - device, leased, num_held - in_memory)


@st.composite
def events(draw: st.DrawFn) -> Event:
    chain = draw(st.integers(0, CHAINS - 1))
    depth = draw(st.integers(1, DEPTH))
    kind = draw(st.sampled_from(["held", "held", "gone", "lease_ended"]))
    names = [f"{chain}.{i}" for i in range(DEPTH - depth, DEPTH)]
    if kind == "gone":
        return ChainGone(seq=0, names=names, reason="evicted")
    if kind == "lease_ended":
        return LeaseEnded(seq=0, entry="e", names=names, reason="expired")
    num_leased = draw(st.integers(0, depth))
    return chain_of(
        chain,
        depth,
        tier=draw(st.sampled_from(["device", "host", "disk"])),
        num_leased=num_leased,
        lease_seconds=LEASE_SECONDS if num_leased else None,
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(events(), st.sampled_from(["lose", "reconnect", "restart", "beat"])), max_size=60
    )
)
def test_the_index_is_what_the_engine_holds_whatever_gets_lost(steps: list[Event | str]) -> None:
    """Frames get lost, connections break, the engine restarts; its own log replays or snapshots."""

    async def check() -> None:
        log = EventLog("epoch-0")
        model = Model()
        holdings = Holdings()
        lost = 0

        async def reconnect() -> None:
            async def snapshot() -> Snapshot:
                return model.snapshot(log.last_seq, log.epoch)

            frames = log.subscribe(holdings.epoch, holdings.seq, snapshot)
            while holdings.epoch != log.epoch or holdings.seq != log.last_seq:
                assert holdings.apply(await anext(frames), 0.0)
            await frames.aclose()  # type: ignore[attr-defined]

        await reconnect()
        for number, step in enumerate(steps):
            if step == "lose":
                lost += 1
            elif step == "reconnect":
                await reconnect()
            elif step == "beat":
                if not holdings.apply(Heartbeat(seq=log.last_seq), 0.0):
                    await reconnect()
            elif step == "restart":
                log = EventLog(f"epoch-{number + 1}")
                model = Model()
                await reconnect()
            elif not isinstance(step, str):
                model.take(step)
                log.publish([step])
                frame: EventFrame = msgspec.structs.replace(step, seq=log.last_seq)
                if lost:
                    lost -= 1
                elif not holdings.apply(frame, 0.0):
                    await reconnect()
        await reconnect()
        assert len(holdings) == len(model.tier)
        for chain in range(CHAINS):
            assert holdings.coverage(ends_of(chain), 1.0) == model.coverage(ends_of(chain))

    asyncio.run(check())


def begun(holdings: Holdings, *chains: ChainHeld) -> Holdings:
    assert holdings.apply(Snapshot(seq=1, epoch="e", chains=list(chains)), 0.0)
    return holdings


def test_what_was_said_too_long_ago_is_not_believed() -> None:
    holdings = Holdings()
    assert holdings.is_stale(0.0)
    begun(holdings)
    assert not holdings.is_stale(STALE_SECONDS) and holdings.is_stale(STALE_SECONDS + 0.1)
    holdings.apply(Heartbeat(seq=1), STALE_SECONDS + 1)
    assert not holdings.is_stale(STALE_SECONDS + 1)


def test_a_lease_counts_until_the_engine_ends_it_whether_or_not_its_seconds_were_told() -> None:
    for seconds in (10.0, None):
        chain = chain_of(0, 3, num_leased=2, lease_seconds=seconds)
        holdings = begun(Holdings(), chain)
        assert holdings.coverage(ends_of(0), 9.0) == Coverage(48, 0, 32)
        ended = LeaseEnded(seq=2, entry="e", names=["0.0", "0.1"], reason="expired")
        assert holdings.apply(ended, 11.0)
        assert holdings.coverage(ends_of(0), 11.0) == Coverage(48, 0, 0)


def test_a_full_index_takes_no_more_bytes_than_it_may_and_what_is_forgotten_is_counted() -> None:
    number_of_names = 20_000
    engines = 8
    counted = list[int]()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex(number_of_names * BYTES_PER_NAME, counted.append)
        holders = [begun(Holdings(index)) for _ in range(engines)]
        for number in range(number_of_names // 5):
            names = [HeldName(f"{number * 10 + n:016x}", 10) for n in range(10)]
            for seq, holdings in enumerate(holders[number % engines :], number):
                frame = ChainHeld(seq=holdings.seq + 1, names=names, num_leased=10 * (seq % 2))
                assert holdings.apply(frame, float(number))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.8 * number_of_names < len(index) <= index.max_names == number_of_names
    assert index.num_forgotten == sum(counted) >= number_of_names
    assert taken <= number_of_names * BYTES_PER_NAME
    assert sum(h.num_forgotten for h in holders) >= index.num_forgotten
    every = {digest: bits for shard in index._shards for digest, bits in shard.items()}
    for holdings in holders:
        assert len(holdings) == sum(bits >> 8 + holdings.slot & 1 for bits in every.values())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(1, 300))
def test_bisection_finds_what_looking_at_every_name_finds(depths: list[int], num: int) -> None:
    """Of engines that hold all up to a depth, as one does that drops a chain from its end."""
    index = PrefixIndex()
    ends = Ends([f"{n}" for n in range(num)], [n + 1 for n in range(num)])
    holders = [Holdings(index) for _ in depths]
    for holdings, depth in zip(holders, depths, strict=True):
        names = [HeldName(f"{n}", n + 1) for n in range(depth)]
        begun(holdings, ChainHeld(seq=1, names=names, num_leased=depth // 2))
    coverages = [
        Coverage(min(depth, num), 0, min(depth // 2, num)) if depth else NOTHING for depth in depths
    ]
    assert [holdings.coverage(ends, 0.0) for holdings in holders] == coverages
    index.has_gaps = True
    assert [holdings.coverage(ends, 0.0) for holdings in holders] == coverages


def test_where_entries_alone_are_held_every_name_is_looked_at() -> None:
    index = PrefixIndex()
    num = 400
    chain = ChainHeld(seq=1, names=[HeldName("77", 78), HeldName("301", 302)])
    holdings = begun(Holdings(index), chain)
    ends = Ends([f"{n}" for n in range(num)], [n + 1 for n in range(num)])
    assert num - NEAR_NAMES > 301
    index.has_gaps = True
    assert holdings.coverage(ends, 0.0).held == 302


DOCUMENTS = [Copied("a", 10, 50), Copied("b", 66, 100), Copied("c", 130, 170)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, DEPTH),
            st.dictionaries(
                st.sampled_from("abc"),
                st.tuples(st.sampled_from(["device", "host", "disk"]), st.booleans()),
            ),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_documents_count_behind_the_prefix_that_an_engine_holds(
    engines: list[tuple[int, dict[str, tuple[Tier, bool]]]],
) -> None:
    index = PrefixIndex()
    prompt = ends_of(0, DEPTH)
    holders = [Holdings(index) for _ in engines]
    for holdings, (depth, documents) in zip(holders, engines, strict=True):
        chains = [chain_of(0, depth, num_leased=depth)] + [
            ChainHeld(seq=0, names=[HeldName(name, 32)], tier=tier, num_leased=int(is_leased))
            for name, (tier, is_leased) in documents.items()
        ]
        holdings.apply(Snapshot(seq=1, epoch="e", chains=chains), 0.0)
    covered = index.cover(prompt._replace(documents=DOCUMENTS), 0.0)
    for holdings, (depth, documents) in zip(holders, engines, strict=True):
        sizes = dict.fromkeys(("device", "host", "disk", "leased"), 0)
        sizes["device"] = sizes["leased"] = prefix = 16 * depth
        for name, start, end in DOCUMENTS:
            tier, is_leased = documents.get(name, ("device", False))
            covered_tokens = len(range(max(start, prefix), end)) if name in documents else 0
            sizes[tier] += covered_tokens
            sizes["leased"] += covered_tokens * is_leased
        coverage = covered.get(holdings.slot, NOTHING)
        assert {tier: getattr(coverage, tier) for tier in sizes} == sizes
        assert coverage.prefix == prefix
        assert {"abc"[n] for n in range(3) if coverage.holds(n)} == set(documents)
        assert index.cover(prompt, 0.0).get(holdings.slot, NOTHING).held == prefix
