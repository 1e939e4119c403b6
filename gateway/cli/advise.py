"""python -m gateway advise: which markers would have paid"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gateway.admin.advice import MAX_TURNS, AdviseRequest, Gathering, of_requests
from gateway.admin.structs.advice import AdviceReport, Finding
from gateway.advice.pasted import DIALECTS, MAX_CHARACTERS, MAX_REQUESTS
from gateway.advice.stream import advise_stream
from gateway.base.clock import Clock
from gateway.base.settings import load_price_files
from gateway.cli.arguments import Commands, count, moment_ms
from gateway.cli.upkeep import now_ms, run_long_in_ledger
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import observed
from gateway.planning.asked import DEFAULT_MIN_TOKENS
from gateway.prices.files import SHIPPED, load_prices

_DAY_MS = 86_400_000


def add_commands(commands: Commands) -> None:
    advise = commands.add_parser("advise", help="say which markers would have paid")
    advise.add_argument(
        "files", nargs="*", type=Path, help="requests: JSON of any dialect, or curl; `-` is stdin"
    )
    advise.add_argument("--dialect", choices=DIALECTS)
    advise.add_argument("--workspace")
    advise.add_argument("--key")
    advise.add_argument("--model")
    advise.add_argument("--since", type=moment_ms, metavar="TIME", help="default: a day ago")
    advise.add_argument("--until", type=moment_ms, metavar="TIME", help="default: now")
    advise.add_argument("--min-tokens", type=count, default=DEFAULT_MIN_TOKENS)
    advise.add_argument("--json", action="store_true", help="the whole advice")
    advise.set_defaults(run=_advise)


def _advise(options: argparse.Namespace) -> int:
    if options.files:
        if len(options.files) > MAX_REQUESTS:
            print(f"files: {MAX_REQUESTS} at most", file=sys.stderr)
            return 2
        try:
            report = _of_files(options)
        except (OSError, UnicodeDecodeError) as error:
            print(error, file=sys.stderr)
            return 2
    else:
        until = now_ms() if options.until is None else options.until
        since = until - _DAY_MS if options.since is None else options.since
        if since >= until:
            print("--since: must be before --until", file=sys.stderr)
            return 2
        report = _of_ledger(options, since, until)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print("\n".join(_lines(report)))
    return 0


def _of_files(options: argparse.Namespace) -> AdviceReport:
    asked = AdviseRequest(
        requests=[_text(path) for path in options.files],
        dialect=options.dialect,
        min_tokens=options.min_tokens,
    )
    prices = load_prices(load_price_files().prices or SHIPPED)
    return of_requests(asked, prices, Clock().wall().date(), lambda _: DEFAULT_MIN_TOKENS)


def _text(path: Path) -> str:
    """No more than what is refused as too long."""
    with sys.stdin if str(path) == "-" else path.open(encoding="utf-8") as file:
        return file.read(MAX_CHARACTERS + 1)


def _of_ledger(options: argparse.Namespace, since: int, until: int) -> AdviceReport:
    of = Range(since_ms=since, until_ms=until, workspace=options.workspace, model=options.model)
    gathering = Gathering(load_prices(load_price_files().prices or SHIPPED))

    async def gather(ledger: Ledger) -> None:
        async for rows in observed(ledger, of, options.key, MAX_TURNS):
            gathering.take(rows)

    run_long_in_ledger(gather)
    advices = [advise_stream(turns, options.min_tokens) for _, turns in gathering.largest()]
    return gathering.report(of, advices, MAX_TURNS)


def _lines(report: AdviceReport) -> Iterable[str]:
    yield report.text
    for number, request in enumerate(report.requests):
        yield f"\nrequests[{number}] ({request.dialect}, about {request.tokens:,} tokens)"
        yield from _findings(request.findings)
    for stream in report.streams:
        yield f"\n{stream.workspace} {stream.key} {stream.model}: {stream.num_turns:,} requests"
        yield f"  {stream.text}"
        if stream.saves.prefill_seconds:
            yield f"  Prefill saved: {stream.saves.prefill_seconds:,.1f} s."
        if stream.next_best:
            yield f"  {stream.next_best}"
        yield from _findings(stream.findings)
        yield f"  {stream.prewarm.text}"
        yield f"  From: {', '.join(stream.turns)}"


def _findings(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        yield f"  {finding.path}: {finding.text} {finding.change}"
        if finding.turns:
            yield f"    From: {', '.join(finding.turns)}"
