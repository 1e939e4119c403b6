"""python -m gateway recover: settles the turns of a gateway that will not come back.

With the gateway's journal the command does what the gateway's own next start would do. Without a
journal it uses the counts that engines still keep because nobody acknowledged them. These become
rows without the key and the exact time. If an engine does not answer, its counts are missing. The
command names each such engine, and ends with 1.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engine.protocol import FinalCounts
from engine.supervisor import Supervisor
from gateway.admission.keyring import KeyRing
from gateway.base.catalogue import load_catalogue
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, NotFound
from gateway.base.logs import configure
from gateway.base.metrics import Metrics
from gateway.base.settings import Settings, load
from gateway.base.words import counted
from gateway.cli.arguments import Commands
from gateway.cli.running import why_not_ready
from gateway.journal.drain import Billing, Drain
from gateway.journal.file import has_journal
from gateway.journal.rebuilt import Counted, Rebuilder, instance_of, last_attempts
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.journal.versions import check_version
from gateway.ledger.access import Keys
from gateway.ledger.database import Ledger
from gateway.ledger.row_ends import end_rows
from gateway.prices.files import PriceBook
from gateway.routing.client import EngineHttp
from gateway.routing.discovery import places_now
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.model_ids import ModelIds

_POLL_SECONDS = 0.2


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser("recover", help="close the turns of a gateway that is gone")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--journal", type=Path, help="the directory of its journal")
    which.add_argument("--instance", help="its id, where the journal is lost too")
    parser.set_defaults(run=_recover)


def _recover(options: argparse.Namespace) -> int:
    settings = load()
    configure(settings.log_level)
    if options.journal is not None:
        recovered = asyncio.run(recover_journal(settings, options.journal))
        turns = counted(recovered.turns, "turn")
        print(f"{turns}, {recovered.closed} of them open; {recovered.left} left")
        lacks = "open turns that ran there were closed without its counts"
        return max(_warn(recovered.not_asked, lacks), int(recovered.left > 0))
    if options.instance is not None:
        rebuilt = asyncio.run(recover_instance(settings, options.instance))
        counts = counted(rebuilt.counts, "final count")
        print(f"{counted(rebuilt.turns, 'turn')}, of {counts} that engines kept")
        return _warn(rebuilt.not_asked, "turns that it counted are not among these")
    kept = asyncio.run(count_open_turns(settings))
    for instance, count in sorted(kept.by_instance.items()):
        print(instance, count)
    return _warn(kept.not_asked, "its counts are not among these")


def _warn(not_asked: Mapping[str, str], lacks: str) -> int:
    """Name the engines whose counts are missing. Return the command's status."""
    for name, reason in sorted(not_asked.items()):
        print(f"{name} was not asked ({reason}): {lacks}", file=sys.stderr)
    return int(bool(not_asked))


class Recovered(NamedTuple):
    """What `recover_journal` did. Three fields are numbers of turns."""

    # All turns of the journal.
    turns: int
    # Turns that were still open and are closed now.
    closed: int
    # Turns that could not be closed.
    left: int
    # Why each engine that did not answer is not ready, by its name.
    not_asked: Mapping[str, str]


class Rebuilt(NamedTuple):
    """What `recover_instance` did."""

    # The number of turns for which rows were made.
    turns: int
    # The number of final counts that they were made of.
    counts: int
    # As in `Recovered`.
    not_asked: Mapping[str, str]


class Kept(NamedTuple):
    """The final counts that engines keep."""

    # How many there are, by the gateway's instance.
    by_instance: Counter[str]
    # As in `Recovered`.
    not_asked: Mapping[str, str]


async def recover_journal(settings: Settings, directory: Path) -> Recovered:
    """Settle all turns in the journal.

    Raise JournalUnavailable while the journal's gateway runs, and LedgerUnavailable without the
    database. What was settled before an error stays settled, and the command can run again.
    """
    check_version(directory)
    if not has_journal(directory):
        raise NotFound(f"no journal in `{directory}`")
    metrics = Metrics()
    prices = PriceBook(settings.prices, settings.hosted_prices)
    journal = Journal(directory, settings.journal_max_bytes).start()
    try:
        async with _parts(settings) as (fleet, ledger):
            not_asked = _not_asked(fleet)
            charge = Billing(prices, metrics).charge
            now = Clock().monotonic
            reconciler = Reconciler(journal, fleet.engines, metrics, charge, now, ledger.known)
            await reconciler.step(is_sweep=True)
            closed = await reconciler.recover()
            turns = journal.backlog
            while reconciler.num_pending:
                await reconciler.step()
                await asyncio.sleep(_POLL_SECONDS)
            drain = Drain(
                journal,
                ledger.insert_turns,
                fleet.acknowledge,
                metrics,
                ledger.known,
                partial(end_rows, ledger),
            )
            while await drain.step():
                pass
            return Recovered(turns, closed, journal.backlog, not_asked)
    finally:
        await journal.stop()


async def count_open_turns(settings: Settings) -> Kept:
    """How many final counts the engines keep, by the instance of the gateway that asked."""
    async with _parts(settings) as (fleet, _):
        not_asked = _not_asked(fleet)
        kept = await _counts(fleet)
        return Kept(Counter(instance_of(final.request_id) for _, final in kept), not_asked)


def _not_asked(fleet: Fleet) -> dict[str, str]:
    """Why each engine that does not answer now is not ready."""
    return {
        engine.name: why_not_ready(engine) for engine in fleet.engines if engine.status != "ready"
    }


async def recover_instance(settings: Settings, instance: str) -> Rebuilt:
    """Make rows of the engines' counts for one instance that is gone with its journal.

    The instance must not be a running gateway. The rows made here would take the place of its own
    rows, which say more.
    """
    charge = Billing(PriceBook(settings.prices, settings.hosted_prices), Metrics()).charge
    catalogue = load_catalogue(settings.models)
    async with _parts(settings) as (fleet, ledger):
        keys = Keys(ledger)
        rebuilder = Rebuilder(
            KeyRing(keys, settings, Clock()).scope_of,
            fleet.model_of,
            lambda model: catalogue.price_of(model, fleet.served),
            Clock().wall,
        )
        not_asked = _not_asked(fleet)
        kept = await _counts(fleet)
        finals = [entry for entry in kept if instance_of(entry[1].request_id) == instance]
        last = last_attempts(Counted(engine.name, final) for engine, final in finals)
        records = rebuilder.records(last.values(), await keys.workspaces())
        for record in records:
            charge(record)
        if records:
            await ledger.insert_turns(records)
        for engine in fleet.ready:
            request_ids = [final.request_id for where, final in finals if where is engine]
            if request_ids:
                await engine.ack(request_ids)
        return Rebuilt(len(records), len(finals), not_asked)


async def _counts(fleet: Fleet) -> list[tuple[Engine, FinalCounts]]:
    """The counts of the ready engines that nobody has acknowledged."""
    return [(engine, final) for engine in fleet.ready for final in await engine.unacknowledged()]


@asynccontextmanager
async def _parts(settings: Settings) -> AsyncIterator[tuple[Fleet, Ledger]]:
    secret = settings.engine_secret.get_secret_value()
    ledger = Ledger(settings.ledger_url)
    async with aclosing(EngineHttp()) as http:
        supervisor = Supervisor(has_messages=True)
        places = await places_now(settings.engines)
        fleet = Fleet(
            [f"{place.name}={place.url}" for place in places],
            lambda name, url: Engine(name, url, secret, http),
            supervisor,
            ModelIds(None, Clock().wall),
        )
        await fleet.start()
        try:
            if not fleet.ready:
                raise GatewayError("no engine is ready, so none can be asked for its counts")
            yield fleet, ledger
        finally:
            await fleet.stop()
            await ledger.close()
