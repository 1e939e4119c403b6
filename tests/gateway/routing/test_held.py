"""The residency index against a model, and against the engine's own event log."""

import asyncio
import tracemalloc
from collections.abc import Sequence
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
    InputUsage,
    LeaseEnded,
    Receipt,
    Snapshot,
    Started,
    Tier,
)
from gateway.routing.held import (
    BYTES_PER_NAME,
    CONFIRM_SECONDS,
    EXPECTED_SECONDS,
    NOTHING,
    STALE_SECONDS,
    Coverage,
    PrefixEnd,
    ResidencyIndex,
)

LEASE_SECONDS = 300.0
CHAINS = 3
DEPTH = 5
NAMES = [f"{chain}.{depth}" for chain in range(CHAINS) for depth in range(DEPTH)]


def chain_of(chain: int, depth: int, seq: int = 0, **changes: Any) -> ChainHeld:
    names = [HeldName(f"{chain}.{i}", (i + 1) * 16) for i in range(depth)]
    return ChainHeld(seq=seq, names=names, **changes)


def ends_of(chain: int, depth: int = DEPTH) -> list[PrefixEnd]:
    return [PrefixEnd(f"{chain}.{i}", (i + 1) * 16) for i in range(depth)]


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

    def coverage(self, ends: Sequence[PrefixEnd]) -> Coverage:
        held = max((e.size for e in ends if e.digest in self.tier), default=0)
        device = max((e.size for e in ends if self.tier.get(e.digest) == "device"), default=0)
        leased = max((e.size for e in ends if e.digest in self.leased), default=0)
        above = (e.size for e in ends if self.tier.get(e.digest) in ("device", "host"))
        in_memory = max(above, default=0)
        return Coverage(device, in_memory - device, leased, held - in_memory)


@st.composite
def events(draw: st.DrawFn) -> Event:
    chain, depth = draw(st.integers(0, CHAINS - 1)), draw(st.integers(1, DEPTH))
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
def test_the_index_is_what_the_engine_holds_whatever_gets_lost(
    steps: list[Event | str],
) -> None:
    """Frames get lost, connections break, the engine restarts; its own log replays or snapshots."""

    async def check() -> None:
        log, model, holdings = EventLog("epoch-0"), Model(), ResidencyIndex()
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
                log, model = EventLog(f"epoch-{number + 1}"), Model()
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


def begun(holdings: ResidencyIndex, *chains: ChainHeld) -> ResidencyIndex:
    assert holdings.apply(Snapshot(seq=1, epoch="e", chains=list(chains)), 0.0)
    return holdings


def test_what_was_said_too_long_ago_is_not_believed() -> None:
    holdings = ResidencyIndex()
    assert holdings.is_stale(0.0)
    begun(holdings)
    assert not holdings.is_stale(STALE_SECONDS) and holdings.is_stale(STALE_SECONDS + 0.1)
    holdings.apply(Heartbeat(seq=1), STALE_SECONDS + 1)
    assert not holdings.is_stale(STALE_SECONDS + 1)


def test_a_lease_counts_until_it_runs_out() -> None:
    held = chain_of(0, 3, num_leased=2, lease_seconds=10.0)
    holdings = begun(ResidencyIndex(), held)
    assert holdings.coverage(ends_of(0), 9.0) == Coverage(48, 0, 32)
    assert holdings.coverage(ends_of(0), 11.0) == Coverage(48, 0, 0)


def test_an_expected_prefix_counts_until_taken_back_or_too_old() -> None:
    holdings = begun(ResidencyIndex())
    holdings.expect(ends_of(0, 2), 0.0)
    assert holdings.coverage(ends_of(0), 1.0).device == 32
    assert holdings.coverage(ends_of(0), EXPECTED_SECONDS + 1) == NOTHING
    holdings.expect(ends_of(0, 2), 0.0)
    holdings.disappoint(ends_of(0, 2))
    assert holdings.coverage(ends_of(0), 1.0) == NOTHING
    begun(holdings, chain_of(1, 1))
    holdings.expect(ends_of(1, 1), 0.0)
    holdings.disappoint(ends_of(1, 1))
    assert holdings.coverage(ends_of(1), 1.0).device == 16, "the engine said so itself"
    # A receipt counts until the event should have come.
    holdings.learn(*started(2), 0.0)
    assert holdings.coverage(ends_of(0), CONFIRM_SECONDS - 1).device == 32
    assert holdings.coverage(ends_of(0), CONFIRM_SECONDS + 1) == NOTHING


def started(num_held: int, epoch: str = "e", chain: int = 0) -> tuple[Started, list[str]]:
    receipt = Receipt(name_tokens=[16 * (i + 1) for i in range(DEPTH)], num_held=num_held)
    usage = InputUsage(input_tokens=DEPTH * 16)
    frame = Started(request_id="r", epoch=epoch, usage=usage, breakpoints=[], receipt=receipt)
    return frame, [f"{chain}.{i}" for i in range(DEPTH)]


def test_a_full_index_takes_no_more_bytes_than_it_may_and_what_is_forgotten_is_counted() -> None:
    number_of_names = 20_000
    tracemalloc.start()
    try:
        index = ResidencyIndex(max_names=number_of_names)
        before = tracemalloc.get_traced_memory()[0]
        begun(index)
        for number in range(number_of_names // 5):
            names = [HeldName(f"{number * 10 + n:016x}", 10) for n in range(10)]
            frame = ChainHeld(seq=number + 2, names=names, num_leased=10, lease_seconds=300.0)
            assert index.apply(frame, float(number))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(index) == index.num_forgotten == number_of_names
    assert taken <= number_of_names * BYTES_PER_NAME
    # A name that no gateway gave takes nothing.
    index = begun(ResidencyIndex())
    held = ChainHeld(seq=2, names=[HeldName("a" * 1_000_000, 10), HeldName("b" * 16, 20)])
    assert index.apply(held, 1.0) and len(index) == 1
