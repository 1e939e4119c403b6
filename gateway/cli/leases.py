"""python -m gateway leases: the live entries of a gateway that runs

For an engine that does not answer a line says so, because it may hold entries all the same.
"""

import argparse
import sys
from functools import partial

from gateway.base.settings import load
from gateway.cli.arguments import Commands, UsageError, add_actions
from gateway.cli.running import add_url, ask, url_of
from gateway.structs.fleet import EngineReport, LiveEntry, Workspace

_ID_DIGITS = 16
_MOST = 2000


def add_commands(commands: Commands) -> None:
    actions = add_actions(commands, "leases", "list live entries, leased or not")
    command = actions.add_parser("list", help="live entries of all engines, the largest first")
    command.add_argument("--workspace", metavar="NAME", help="only this workspace's")
    command.add_argument("--engine", metavar="NAME", help="only this engine's")
    add_url(command)
    command.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    """Print the entries. An unknown name is an error. For it the admin API answers an empty list,
    so names are checked if the list is empty."""
    key = load().admin_key
    if key is None:
        raise UsageError("HOLDFAST_ADMIN_KEY: is not set; `leases` asks the admin API with it")
    get = partial(ask, url_of(options), key=key.get_secret_value())
    query = {
        name: value
        for name, value in (("workspace", options.workspace), ("engine", options.engine))
        if value is not None
    }
    query["limit"] = str(_MOST)
    entries = get("/admin/v1/leases", list[LiveEntry], query)
    if not entries and options.workspace is not None:
        spaces = get("/admin/v1/workspaces", list[Workspace])
        _check("workspace", options.workspace, {space.id for space in spaces})
    if not entries and options.engine is not None:
        engines = get("/admin/v1/engines", list[EngineReport])
        _check("engine", options.engine, {engine.name for engine in engines})
    for entry in entries:
        print(_line(entry))
    if len(entries) >= _MOST:
        print(f"these are the {_MOST:,} largest: there may be more", file=sys.stderr)
    silent = [
        report
        for report in get("/admin/v1/engines", list[EngineReport])
        if options.engine in (None, report.name) and report.stats is None
    ]
    for report in silent:
        print(f"{report.name} not known: {_why(report)}")
    return int(bool(silent))


def _why(report: EngineReport) -> str:
    if report.status == "ready":
        return "it did not answer in time"
    reason = report.detail.get("error") or report.detail.get("stage") or ""
    return f"{report.status}: {reason}" if reason else report.status


def _check(option: str, name: str, names: set[str]) -> None:
    if name not in names:
        raise UsageError(f"--{option}: no {option} `{name}`; there are: {', '.join(sorted(names))}")


def _line(live: LiveEntry) -> str:
    """The line of one entry. It begins with the prefix's id, as the dashboard shows it."""
    entry = live.entry
    state = f"{entry.state}: {entry.reason}" if entry.reason else entry.state
    ttl = "its own" if live.has_own_end else entry.ttl
    return (
        f"{(entry.name or entry.entry)[:_ID_DIGITS]} {live.engine} {live.workspace or '-'}"
        f" {entry.tokens} tokens, TTL {ttl}, {entry.expires_in_seconds:.0f} s left, {state}"
    )
