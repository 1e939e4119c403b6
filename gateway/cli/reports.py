"""python -m gateway advise | plan: which markers would have paid, and what memory would give"""

import argparse
import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.admin.advice import MAX_TURNS, AdviseRequest, Gathering, of_requests
from gateway.admin.plan import TrafficGathering
from gateway.advice.duplicates import find_groups, near_duplicate
from gateway.advice.pasted import DIALECTS, MAX_CHARACTERS, MAX_REQUESTS
from gateway.advice.stream import advise_stream
from gateway.base.clock import Clock
from gateway.base.errors import InvalidRequest
from gateway.base.settings import load_price_files
from gateway.base.words import counted
from gateway.cli.arguments import UNITS_MS, Commands, UsageError, count, moment_ms
from gateway.cli.upkeep import now_ms, run_long_in_ledger
from gateway.ledger.database import Ledger
from gateway.ledger.reads.prefill_times import token_times
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import observed
from gateway.planning.process import Planners
from gateway.planning.traffic import DEFAULT_MIN_TOKENS, MAX_TRACE_CHARACTERS, Job, PlanRequest
from gateway.planning.traffic import MAX_TURNS as MAX_PLAN_TURNS
from gateway.prices.files import SHIPPED, load_prices
from gateway.prices.price import PriceSheets
from gateway.structs.advice import AdviceReport, Finding, NearDuplicate
from gateway.structs.plan import Plan, Planned, Point

G = TypeVar("G", Gathering, TrafficGathering)
_BAR = 40


def add_commands(commands: Commands) -> None:
    advise = commands.add_parser("advise", help="say which markers would have paid")
    advise.add_argument(
        "files", nargs="*", type=Path, help="requests: JSON of any dialect, or curl; `-` is stdin"
    )
    advise.add_argument("--dialect", choices=DIALECTS)
    advise.add_argument("--model")
    advise.add_argument("--min-tokens", type=count, default=DEFAULT_MIN_TOKENS)
    plan = commands.add_parser("plan", help="say what memory, tiers and engines would give")
    for name, about in (
        ("device-tokens", "tokens that the device memory of one engine holds"),
        ("host-tokens", "tokens that its host memory holds"),
        ("disk-tokens", "tokens that its disk holds"),
        ("engines", "how many engines there are"),
        ("max-running", "requests that one engine computes together"),
        ("min-cache-tokens", "the shortest prefix that is cached"),
    ):
        plan.add_argument(f"--{name}", type=int, help=about)
    plan.add_argument("--lease-share", type=float, help="part of the memory that leases may hold")
    plan.add_argument("--trace", type=Path, help="traffic: lines of JSON in Mooncake's format")
    plan.add_argument("--trace-block-tokens", type=count, help="tokens of its blocks; default: 512")
    plan.add_argument("--served-model", help="only turns of this model of the ledger")
    for parser, run, start in ((advise, _advise, "a day"), (plan, _plan, "a week")):
        parser.add_argument("--workspace")
        parser.add_argument("--key")
        parser.add_argument("--since", type=moment_ms, metavar="TIME", help=f"default: {start} ago")
        parser.add_argument("--until", type=moment_ms, metavar="TIME", help="default: now")
        parser.add_argument("--json", action="store_true", help="all of it")
        parser.set_defaults(run=run)


def _advise(options: argparse.Namespace) -> int:
    prices = _prices()
    if options.files:
        if len(options.files) > MAX_REQUESTS:
            raise UsageError(f"files: {MAX_REQUESTS} at most")
        request = AdviseRequest(
            # One character more than the longest text, so that a longer file is refused.
            requests=[_text(path, MAX_CHARACTERS + 1) for path in options.files],
            dialect=options.dialect,
            min_tokens=options.min_tokens,
        )
        today = Clock().wall().date()
        report = of_requests(request, prices, today, lambda _: DEFAULT_MIN_TOKENS)
    else:
        since, until = _since_until(options, UNITS_MS["d"])
        of = Range(since_ms=since, until_ms=until, workspace=options.workspace, model=options.model)
        times = run_long_in_ledger(lambda ledger: token_times(ledger, _same))
        gathering = _gathered(Gathering(prices, times), of, options.key, MAX_TURNS)
        advices = [advise_stream(turns, options.min_tokens) for _, turns in gathering.largest()]
        least = options.min_tokens
        near = list[NearDuplicate]()
        for _, turns in gathering.together():
            for group in find_groups(turns, least):
                duplicate = near_duplicate(group, least, {})
                if duplicate is not None:
                    near.append(duplicate)
        report = gathering.report(of, advices, MAX_TURNS, near)
    return _print(options, report, _advice_lines(report))


def _plan(options: argparse.Namespace) -> int:
    try:
        request = _plan_request(options)
        since, until = _since_until(options, UNITS_MS["w"])
        of = Range(
            since_ms=since,
            until_ms=until,
            workspace=request.workspace,
            model=request.served_model,
        )
        if request.trace is not None:
            job = Job(request=request)
        else:
            gathering = _gathered(TrafficGathering(_prices()), of, request.key, MAX_PLAN_TURNS)
            # Only a running gateway knows the engines. The ledger does not.
            job = gathering.job(request, None)
        plan = asyncio.run(_planned(job))
    except InvalidRequest as error:
        raise UsageError(str(error).replace("since_ms: ", "--since: ")) from None
    return _print(options, plan, _plan_lines(plan))


def _same(name: str) -> str:
    """The name of an engine's model, as the engine calls it: this command has no table of
    models."""
    return name


def _prices() -> PriceSheets:
    return load_prices(load_price_files().prices or SHIPPED)


def _since_until(options: argparse.Namespace, span_ms: int) -> tuple[int, int]:
    until = now_ms() if options.until is None else options.until
    since = until - span_ms if options.since is None else options.since
    if since >= until:
        raise UsageError("--since: must be before --until")
    return since, until


def _gathered(gathering: G, of: Range, key: str | None, most: int) -> G:
    async def gather(ledger: Ledger) -> None:
        async for rows in observed(ledger, of, key, most):
            gathering.take(rows)

    run_long_in_ledger(gather)
    return gathering


def _text(path: Path, most: int) -> str:
    """The first `most` characters of the file; `-` is standard input."""
    try:
        with sys.stdin if str(path) == "-" else path.open(encoding="utf-8") as file:
            return file.read(most)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(str(error)) from None


def _whole(path: Path, most: int) -> str:
    text = _text(path, most + 1)
    if len(text) > most:
        raise UsageError(f"{path}: {most:,} characters at most")
    return text


def _print(options: argparse.Namespace, report: AdviceReport | Plan, lines: Iterable[str]) -> int:
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print("\n".join(lines))
    return 0


def _advice_lines(report: AdviceReport) -> Iterable[str]:
    yield report.text
    for number, request in enumerate(report.requests):
        yield f"\nrequests[{number}] ({request.dialect}, about {request.tokens:,} tokens)"
        yield from _findings(request.findings)
    for stream in report.streams:
        requests = counted(stream.num_turns, "request")
        yield f"\n{stream.workspace} {stream.key} {stream.model}: {requests}"
        yield f"  {stream.text}"
        if stream.saves.prefill_seconds:
            yield f"  Prefill saved: {stream.saves.prefill_seconds:,.1f} s."
        if stream.next_best:
            yield f"  {stream.next_best}"
        yield from _findings(stream.findings)
        if stream.verdict != "prewarm":
            yield f"  {stream.prewarm.text}"
        yield f"  From: {', '.join(stream.turns)}"
    if report.near_duplicates:
        yield "\nPrefixes that are nearly the same"
        yield from _findings(report.near_duplicates)


def _findings(findings: Iterable[Finding]) -> Iterable[str]:
    for finding in findings:
        yield f"  {finding.path}: {finding.text} {finding.change}"
        if finding.turns:
            yield f"    From: {', '.join(finding.turns)}"


def _plan_request(options: argparse.Namespace) -> PlanRequest:
    """The plan that the options ask for. Raise UsageError for wrong options."""
    names = set(PlanRequest.__struct_fields__) - {"trace"}
    options_by_name = {name: getattr(options, name, None) for name in names}
    values: dict[str, Any] = {
        name: value for name, value in options_by_name.items() if value is not None
    }
    if options.trace is not None:
        values["trace"] = _whole(options.trace, MAX_TRACE_CHARACTERS)
    try:
        return msgspec.convert(values, PlanRequest, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None


async def _planned(job: Job) -> Plan:
    """The plan of a job. On a terminal a bar shows the progress."""
    async for line in Planners().lines(job):
        share, end = (1.0, "\n") if isinstance(line, Planned) else (line.share, "")
        if sys.stderr.isatty():
            print(f"\r[{'#' * int(share * _BAR):-<{_BAR}}]", end=end, file=sys.stderr, flush=True)
        if isinstance(line, Planned):
            return line.plan
    raise InvalidRequest("the planner has ended early")


def _plan_lines(plan: Plan) -> Iterable[str]:
    yield plan.text
    yield from (f"Warning: {text}" for text in plan.warnings)
    engine = plan.engine
    yield (
        f"An engine holds {engine.device_tokens:,} tokens on the device, {engine.host_tokens:,} on"
        f" the host and {engine.disk_tokens:,} on disk."
    )
    if engine.leases_that_fit is not None:
        fit = counted(engine.leases_that_fit, "lease", "leases")
        verb = "fits" if engine.leases_that_fit == 1 else "fit"
        yield f"{fit} of {engine.lease_tokens:,} tokens {verb} into it."
    yield plan.knee_text
    for title, points in (
        ("As it is, all requests", [plan.whole]),
        ("Memory", plan.memory),
        ("Engines", plan.engines),
        ("Tiers", plan.tiers),
    ):
        columns = "      tokens     hit  reused    kept  best effort       p50       p95"
        yield f"\n{title}\n  {'':32} {columns}"
        yield from map(_point, points)
    yield ""
    yield from (change.text for change in plan.changes)
    yield "\nAssumed"
    yield from (f"  {text}" for text in plan.assumptions)


def _point(point: Point) -> str:
    return (
        f"  {point.label:32} {point.device_tokens:12,} {point.hit_rate:7.1%}"
        f" {point.reuse_rate:7.1%} {_share(point.promise_kept):>7}"
        f" {_share(point.best_effort):>12} {_seconds(point.first_token_p50):>9}"
        f" {_seconds(point.first_token_p95):>9}"
    )


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}s"
