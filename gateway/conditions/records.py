"""What is wrong with this gateway's journal, ledger and loops. Pure, except that the files are
checked for their place."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from engine.supervisor import LoopHealth
from gateway.base.words import counted
from gateway.conditions.kinds import Finding
from gateway.journal.audit import Audit
from gateway.journal.drain import Drain
from gateway.journal.lost import LostTurns
from gateway.journal.store import Journal
from gateway.ledger.identity import Identity
from gateway.structs.fleet import PendingPurge

NEARLY_FULL_SHARE = 0.8
_JOURNAL = "the journal"
_LEDGER = "the ledger"


def of_loops(failing: Sequence[LoopHealth]) -> Iterator[Finding]:
    for loop in failing:
        cause = f"{loop.ends} times in a row, last by {loop.error}"
        yield Finding("loop_failing", f"the gateway's loop `{loop.loop}`", cause)


def of_journal(journal: Journal) -> Iterator[Finding]:
    if journal.damaged:
        yield Finding("journal_damaged", _JOURNAL, ", ".join(journal.damaged))
    share = journal.num_bytes / journal.max_bytes
    held = f"{journal.num_bytes:,} of {counted(journal.max_bytes, 'byte')} are taken"
    if not journal.has_room:
        cause = held if share >= 1 else "its last write failed"
        yield Finding("journal_full", _JOURNAL, cause)
    if share > NEARLY_FULL_SHARE:
        yield Finding("journal_nearly_full", _JOURNAL, held)
    if not journal.is_in_place:
        yield Finding("journal_moved", _JOURNAL, "its file was removed or replaced")
    if journal.num_set_aside:
        cause = f"{counted(journal.num_set_aside, 'turn')} can't go to the ledger"
        yield Finding("turns_set_aside", _JOURNAL, cause)


def of_ledger(ledger: Identity, drain: Drain, journal: Journal) -> Iterator[Finding]:
    away = ledger.away or drain.problem
    is_other = ledger.is_damaged or ledger.is_moved
    if is_other:
        yield Finding("ledger_lost", _LEDGER, ledger.problem or "")
    elif ledger.schema_problem is not None:
        yield Finding("schema", _LEDGER, ledger.schema_problem)
    elif away is not None:
        yield Finding("ledger_away", _LEDGER, away)
    elif drain.is_behind and journal.num_closed:
        cause = f"{counted(journal.num_closed, 'closed turn')} of this gateway wait in its journal"
        yield Finding("ledger_behind", _LEDGER, cause)


def of_audit(audit: Audit) -> Iterator[Finding]:
    if audit.findings is None:
        yield Finding("turns_not_counted", "the ledger's turns", "the database was not asked yet")
    for finding in audit.findings or ():
        day = datetime.fromtimestamp(finding.day_ms / 1000, UTC).date()
        about = f"the ledger's turns of {day}"
        if finding.missing:
            cause = f"the ledger lacks {finding.missing} of the turns that this gateway closed then"
            yield Finding("turns_missing", about, cause)
        if finding.damaged:
            cause = f"{counted(finding.damaged, 'turn')} of this gateway have a wrong checksum"
            yield Finding("turns_changed", about, cause)


def of_lost(lost: LostTurns) -> Iterator[Finding]:
    for instance, number in sorted(lost.unclaimed.items()):
        about = f"the turns of gateway {instance}"
        cause = f"engines keep final counts of {counted(number, 'request')} of it"
        yield Finding("counts_unclaimed", about, cause)


def of_purges(
    purges: Sequence[PendingPurge], refusal: str, now: float, wall_ms: int
) -> Iterator[Finding]:
    """The finding on the purges that one engine still has to do.

    `refusal` says why the engine refuses them; it is empty if it does not. `now` is in monotonic
    seconds, and `wall_ms` in milliseconds since 1970.
    """
    if not purges:
        return
    engine = purges[0].engine
    names = [purge.workspace for purge in purges if purge.workspace is not None]
    words = ", ".join(f"`{name}`" for name in names)
    what = f"the content of {words}" if len(names) == len(purges) else "all its content"
    cause = f"{what} was to be purged while it was away"
    if refusal:
        cause = f"{what} is to be purged, and it refuses: {refusal}"
    since = now - max(wall_ms - min(purge.asked_ms for purge in purges), 0) / 1000
    yield Finding("purge_pending", engine, cause, engine, since)


def of_secret(problem: str | None) -> Iterator[Finding]:
    if problem is not None:
        yield Finding("other_master_secret", "the master secret", problem)
