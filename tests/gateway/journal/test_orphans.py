"""Turns that a kill left at an engine before the journal had them."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from engine.protocol import MAX_RECORD_BYTES, FinalCounts, InputUsage, KeptRecord
from gateway.base.metrics import Metrics
from gateway.base.record import TurnRecord
from gateway.journal.orphans import Orphans, TurnNote, note_of
from gateway.journal.pending import PendingOpen
from gateway.journal.reconcile import Reconciler
from gateway.journal.writer import Journal
from tests.gateway.journal.test_journal import Witness, record

NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)


def scope_of(workspace: str) -> str:
    return f"scope of {workspace}"


async def nobody(_: Sequence[str]) -> set[str]:
    return set()


async def names() -> list[str]:
    return ["default", "other"]


class Start:
    """A gateway's start over a journal, beside an engine with counts and notes."""

    def __init__(self, directory: Path, witness: Witness) -> None:
        self.journal, self.charged = Journal(directory), list[TurnRecord]()
        self.now = 0.0
        self.reconciler = Reconciler(
            self.journal,
            [witness],
            Metrics(),
            self.charged.append,
            lambda: self.now,
            nobody,
            Orphans(scope_of, names, lambda: NOW),
        )

    async def settle(self) -> list[TurnRecord]:
        """The closed turns, after as many steps as it takes."""
        await self.reconciler.recover()
        for _ in range(3):
            await self.reconciler.step(is_sweep=True)
        return await self.journal.closed_turns(100)


def orphan(journal: Journal, number: int, **changes: object) -> TurnRecord:
    turn = record(journal, number)
    turn.engine, turn.user_agent, turn.name = None, "agent", "nightly"
    return msgspec.structs.replace(turn, **changes)


def counts_of(turn: TurnRecord, request_id: str = "", scope: str = "default") -> FinalCounts:
    usage = InputUsage(input_tokens=5, cache_read_tokens=7, computed_tokens=5)
    return FinalCounts(
        request_id=request_id or turn.id,
        epoch="e",
        reason="stop",
        usage=usage,
        output_tokens=3,
        scope=scope_of(scope),
    )


def test_an_orphan_becomes_one_row_with_the_engines_counts(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(tmp_path)
        turn = orphan(journal, 1)
        await journal.stop()
        witness = Witness(counts_of(turn, scope="other"))
        witness.kept = [KeptRecord(turn.id, note_of(turn))]
        for number in range(2):
            start = Start(tmp_path, witness)
            (found,) = await start.settle()
            assert start.charged == ([found] if number == 0 else [])
            assert (found.workspace, found.key_id, found.outcome) == (
                "other",
                "key",
                "gateway_killed",
            )
            assert (found.user_agent, found.name, found.opened_at) == (
                "agent",
                "nightly",
                turn.opened_at,
            )
            assert (found.input_tokens, found.cache_read_tokens, found.output_tokens) == (5, 7, 3)
            assert (found.engine, found.epoch, found.price) == ("engine-0", "e", "reference")
            assert await start.journal.set_aside_turns() == [] and not witness.acked
            await start.journal.stop()

    asyncio.run(check())


def test_an_orphans_row_has_all_that_its_turn_was_opened_with(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(tmp_path)
        turn = orphan(
            journal,
            1,
            stream=True,
            num_removed=2,
            dialect="openai",
            prefix="ab" * 16,
            prefix_ttl="1h",
            http_request_id="req_1",
        )
        await journal.stop()
        witness = Witness(counts_of(turn))
        witness.kept = [KeptRecord(turn.id, note_of(turn))]
        start = Start(tmp_path, witness)
        (found,) = await start.settle()
        for field in msgspec.structs.fields(TurnNote):
            assert getattr(turn, field.name) != field.default
            assert getattr(found, field.name) == getattr(turn, field.name)
        await start.journal.stop()

    asyncio.run(check())


def test_a_kill_between_the_opening_of_an_orphan_and_its_close_charges_it_once(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        journal = Journal(tmp_path)
        turn = orphan(journal, 1)
        await journal.stop()
        witness = Witness(counts_of(turn))
        witness.kept = [KeptRecord(turn.id, note_of(turn))]
        first = Start(tmp_path, witness)
        await first.reconciler.step(is_sweep=True)
        assert [one.id for one in await first.journal.open_turns()] == [turn.id]
        assert not first.charged
        await first.journal.stop()
        second = Start(tmp_path, witness)
        (found,) = await second.settle()
        assert found.output_tokens == 3 and second.charged == [found]
        await second.journal.stop()

    asyncio.run(check())


@pytest.mark.parametrize(
    "case", ["no note", "not a note", "old", "of no workspace", "second attempt", "former instance"]
)
def test_what_no_note_explains_is_named_and_its_counts_stay(tmp_path: Path, case: str) -> None:
    async def check() -> None:
        journal = Journal(tmp_path)
        opened_at = NOW - timedelta(days=2) if case == "old" else NOW
        turn = orphan(journal, 1, opened_at=opened_at)
        await journal.stop()
        request_id = f"{turn.id}.2" if case == "second attempt" else turn.id
        scope = "unknown" if case == "of no workspace" else "default"
        witness = Witness(counts_of(turn, request_id, scope))
        note = "{}" if case == "not a note" else note_of(turn)
        witness.kept = [] if case == "no note" else [KeptRecord(request_id, note)]
        start = Start(tmp_path, witness)
        if case == "former instance":
            start.journal.instances = (start.journal.instance, start.journal.instance[::-1])
            other = f"msg_{start.journal.instances[1]}{turn.id[-6:]}"
            witness.counts = [counts_of(turn, other)]
            witness.kept = [KeptRecord(other, note)]
        assert await start.settle() == [] and not start.charged and not witness.acked
        assert len(await start.journal.set_aside_turns()) == 1
        await start.journal.stop()

    asyncio.run(check())


def test_a_turn_that_runs_here_is_no_orphan(tmp_path: Path) -> None:
    """An engine may end a turn before the journal has it, and the journal may never get it."""

    async def check() -> None:
        start = Start(tmp_path, witness := Witness())
        turn = orphan(start.journal, 1)
        witness.counts = [counts_of(turn)]
        witness.kept = [KeptRecord(turn.id, note_of(turn))]
        start.reconciler.begun(turn.id)
        assert await start.settle() == [] and not await start.journal.set_aside_turns()
        start.reconciler.left(turn.id)
        assert [one.id for one in await start.settle()] == [turn.id]
        await start.journal.stop()

    asyncio.run(check())


@pytest.mark.parametrize("is_written", [True, False])
def test_a_turn_that_is_over_waits_for_its_record_before_it_is_closed(
    tmp_path: Path, is_written: bool
) -> None:
    async def check() -> None:
        start = Start(tmp_path, witness := Witness())
        turn = orphan(start.journal, 1, engine="engine-0")
        witness.counts = [counts_of(turn)]
        writing = PendingOpen(lambda: True)
        start.reconciler.take_over(turn, writing)
        await start.reconciler.step(is_sweep=True)
        assert start.reconciler.pending == [turn.id] and not start.charged and not witness.acked
        if is_written:
            await start.journal.open(turn)
            writing.set_result(None)
        else:
            writing.set_exception(TimeoutError())
        await start.reconciler.step(is_sweep=True)
        closed = await start.journal.closed_turns(100)
        # Without a row only what the turn had reserved is settled.
        assert [one.output_tokens for one in closed] == ([3] if is_written else [])
        assert [one.output_tokens for one in start.charged] == [3 if is_written else 0]
        assert witness.acked == ([] if is_written else [turn.id])
        assert not await start.journal.set_aside_turns()
        await start.journal.stop()

    asyncio.run(check())


def test_a_note_is_short_and_names_no_workspace(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(tmp_path)
        turn = orphan(journal, 1, workspace="a-tenant", http_request_id="r" * 64, model="m" * 128)
        note = note_of(turn)
        assert len(note) < 512 and "a-tenant" not in note
        assert note_of(msgspec.structs.replace(turn, name="ü" * MAX_RECORD_BYTES)) == ""
        await journal.stop()

    asyncio.run(check())
