"""python -m gateway plan: what memory, tiers and engines would give, simulated"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.admin.advice import TrafficGathering
from gateway.admin.structs.advice import Plan, Planned, Point
from gateway.base.errors import InvalidRequest
from gateway.base.settings import load_price_files
from gateway.cli.arguments import Commands, moment_ms
from gateway.cli.upkeep import now_ms, run_long_in_ledger
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import observed
from gateway.planning.asked import (
    DTYPES,
    MAX_TRACE_CHARACTERS,
    MAX_TURNS,
    MadeTraffic,
    PlanRequest,
    family_names,
)
from gateway.planning.process import Planners
from gateway.planning.traffic import Job
from gateway.prices.files import SHIPPED, load_prices

_WEEK_MS = 7 * 86_400_000
_MAX_CONFIG_BYTES = 4 * 2**20
_BAR = 40


def add_commands(commands: Commands) -> None:
    plan = commands.add_parser("plan", help="say what memory, tiers and engines would give")
    plan.add_argument("--model", help=f"a family: {', '.join(family_names())}")
    plan.add_argument("--config", type=Path, help="a Hugging Face config.json in place of a family")
    plan.add_argument("--kv-dtype", choices=DTYPES)
    for name, about in (
        ("device-gib", "memory of one device"),
        ("weights-gib", "the part of it that is not for keys and values"),
        ("host-gib", "host memory of one engine for keys and values"),
        ("disk-gib", "disk of one engine for keys and values"),
        ("lease-share", "part of the pool that leases may hold"),
        ("prefill-us", "microseconds of a computed token"),
        ("decode-ms", "milliseconds of a decode step"),
    ):
        plan.add_argument(f"--{name}", type=float, help=about)
    plan.add_argument("--engines", type=int)
    plan.add_argument("--max-running", type=int)
    plan.add_argument("--min-cache-tokens", type=int, help="the shortest prefix that is cached")
    plan.add_argument("--trace", type=Path, help="traffic: lines of JSON in Mooncake's format")
    plan.add_argument(
        "--made",
        metavar="FIELD=VALUE",
        nargs="*",
        help=f"traffic made up by a rule: {', '.join(MadeTraffic.__struct_fields__)}",
    )
    plan.add_argument("--workspace")
    plan.add_argument("--key")
    plan.add_argument("--served-model", help="only turns of this model of the ledger")
    plan.add_argument("--since", type=moment_ms, metavar="TIME", help="default: a week ago")
    plan.add_argument("--until", type=moment_ms, metavar="TIME", help="default: now")
    plan.add_argument("--json", action="store_true", help="the whole plan")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    try:
        job = _job(options)
        plan = asyncio.run(_planned(job))
    except (OSError, UnicodeDecodeError, InvalidRequest) as error:
        print(str(error).replace("since_ms: ", "--since: "), file=sys.stderr)
        return 2
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
    else:
        print("\n".join(_lines(plan)))
    return 0


def _job(options: argparse.Namespace) -> Job:
    asked = _asked(options)
    if asked.trace is not None or asked.made is not None:
        return Job(asked=asked)
    until = now_ms() if options.until is None else options.until
    since = until - _WEEK_MS if options.since is None else options.since
    if since >= until:
        raise InvalidRequest("--since: must be before --until")
    of = Range(since_ms=since, until_ms=until, workspace=asked.workspace, model=asked.served_model)
    gathering = TrafficGathering(load_prices(load_price_files().prices or SHIPPED))

    async def gather(ledger: Ledger) -> None:
        async for rows in observed(ledger, of, asked.key, MAX_TURNS):
            gathering.take(rows)

    run_long_in_ledger(gather)
    return gathering.job(asked)


def _asked(options: argparse.Namespace) -> PlanRequest:
    """Raise InvalidRequest, OSError and UnicodeDecodeError."""
    names = set(PlanRequest.__struct_fields__) - {"config", "trace", "made"}
    given: dict[str, Any] = {
        name: value for name in names if (value := getattr(options, name, None)) is not None
    }
    if options.config is not None:
        try:
            given["config"] = msgspec.json.decode(_text(options.config, _MAX_CONFIG_BYTES))
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"--config: {options.config}: {error}") from None
    if options.trace is not None:
        given["trace"] = _text(options.trace, MAX_TRACE_CHARACTERS)
    if options.made is not None:
        if wrong := next((text for text in options.made if "=" not in text), None):
            raise InvalidRequest(f"--made: `{wrong}` is not field=value")
        given["made"] = dict(text.split("=", 1) for text in options.made)
    try:
        return msgspec.convert(given, PlanRequest, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None


def _text(path: Path, most: int) -> str:
    with path.open(encoding="utf-8") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise InvalidRequest(f"{path}: {most:,} characters at most")
    return text


async def _planned(job: Job) -> Plan:
    is_shown = sys.stderr.isatty()
    async for line in Planners().lines(job):
        if isinstance(line, Planned):
            if is_shown:
                print("\r" + " " * (_BAR + 12) + "\r", end="", file=sys.stderr)
            return line.plan
        if is_shown:
            done = int(line.share * _BAR)
            bar = "#" * done + "-" * (_BAR - done)
            print(f"\r[{bar}] {line.share:4.0%}", end="", file=sys.stderr, flush=True)
    raise InvalidRequest("the planner has ended early")


def _lines(plan: Plan) -> Iterable[str]:
    yield plan.text
    kv = plan.kv
    yield (
        f"A token takes {kv.bytes_per_token:,} bytes; an engine holds {kv.device_tokens:,} tokens"
        f" on the device, {kv.host_tokens:,} on the host and {kv.disk_tokens:,} on disk."
    )
    if kv.leases_that_fit is not None:
        yield f"{kv.leases_that_fit:,} leases of {kv.lease_tokens:,} tokens fit into an engine."
    yield plan.knee_text
    for title, points in (
        ("As asked, all requests", [plan.whole]),
        ("Memory for keys and values", plan.memory),
        ("Engines", plan.engines),
        ("Tiers", plan.tiers),
    ):
        yield f"\n{title}"
        yield from _table(points)
    yield ""
    yield from (change.text for change in plan.buys)
    yield "\nAssumed"
    yield from (f"  {text}" for text in plan.assumptions)


def _table(points: Sequence[Point]) -> Iterable[str]:
    yield (
        f"  {'':32} {'GiB':>8} {'hit':>7} {'reused':>7} {'kept':>7} {'p50':>9} {'p95':>9}"
        f" {'saved':>10}"
    )
    for each in points:
        kept = "-" if each.promise_kept is None else f"{each.promise_kept:.1%}"
        yield (
            f"  {each.label:32} {each.device_gib:8.1f} {each.hit_rate:7.1%} {each.reuse_rate:7.1%}"
            f" {kept:>7} {each.first_token_p50:8.3f}s {each.first_token_p95:8.3f}s"
            f" {each.prefill_saved_seconds:9,.0f}s"
        )
