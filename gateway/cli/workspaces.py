"""python -m gateway workspaces create | set | list | archive | restore"""

import argparse
import sys
from typing import Any

from gateway.admin.structs.fleet import Workspace
from gateway.base.clock import Clock
from gateway.cli.arguments import (
    NONE,
    Commands,
    add_actions,
    add_auto_cache,
    count,
    nano,
    or_none,
    share,
    shown,
)
from gateway.cli.in_ledger import run_in_ledger
from gateway.ledger.access import Workspaces
from gateway.ledger.database import Ledger
from gateway.limits.keyring import EFFECTIVE_SECONDS
from gateway.prices.money import NanoDollars, dollars


def add_commands(commands: Commands) -> None:
    actions = add_actions(commands, "workspaces", "manage workspaces and their limits")
    create = actions.add_parser("create", help="make a workspace")
    change = actions.add_parser("set", help="change a workspace's name or limits")
    for parser, run in ((create, _create_workspace), (change, _change_workspace)):
        parser.add_argument("id")
        parser.add_argument("--display-name")
        for name in ("requests-per-minute", "tokens-per-minute", "max-concurrency"):
            parser.add_argument(f"--{name}", type=or_none(count), help="or `none`")
        parser.add_argument(
            "--monthly-spend",
            dest="monthly_spend_nano",
            type=or_none(nano),
            metavar="DOLLARS",
            help="or `none`",
        )
        parser.add_argument("--lease-share", type=or_none(share), help="0 to 1, or `none`")
        add_auto_cache(parser)
        parser.set_defaults(run=run)
    actions.add_parser("list", help="list workspaces").set_defaults(run=_list_workspaces)
    for name, about in (("archive", "switch all its keys off"), ("restore", "undo an archive")):
        parser = actions.add_parser(name, help=about)
        parser.add_argument("id")
        parser.set_defaults(run=_archive_workspace, is_archived=name == "archive")


def _create_workspace(options: argparse.Namespace) -> int:
    values, now = _given(options), Clock().wall()
    _print(run_in_ledger(lambda ledger: Workspaces(ledger).create(options.id, now, values)))
    return 0


def _change_workspace(options: argparse.Namespace) -> int:
    values = _given(options)
    _print(run_in_ledger(lambda ledger: Workspaces(ledger).change(options.id, values)))
    print(f"counts on every gateway within {EFFECTIVE_SECONDS} seconds", file=sys.stderr)
    return 0


def _archive_workspace(options: argparse.Namespace) -> int:
    async def change(ledger: Ledger) -> Workspace:
        workspaces = Workspaces(ledger)
        if options.is_archived:
            return await workspaces.archive(options.id, Clock().wall())
        return await workspaces.restore(options.id)

    _print(run_in_ledger(change))
    print(f"counts on every gateway within {EFFECTIVE_SECONDS} seconds", file=sys.stderr)
    return 0


def _list_workspaces(_: argparse.Namespace) -> int:
    for workspace in run_in_ledger(lambda ledger: Workspaces(ledger).all()):
        _print(workspace)
    return 0


def _print(workspace: Workspace) -> None:
    spend = workspace.monthly_spend_nano
    print(
        workspace.id,
        "archived" if workspace.archived_at else "active",
        f"name={workspace.display_name!r}",
        f"requests_per_minute={shown(workspace.requests_per_minute)}",
        f"tokens_per_minute={shown(workspace.tokens_per_minute)}",
        f"max_concurrency={shown(workspace.max_concurrency)}",
        f"monthly_spend={NONE if spend is None else dollars(NanoDollars(spend))}",
        f"lease_share={shown(workspace.lease_share)}",
        f"auto_cache={shown(workspace.auto_cache)}",
        f"auto_cache_ttl={shown(workspace.auto_cache_ttl)}",
    )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The columns that the options name. `none` is None; a missing option is left out."""
    names = (*Workspace.__struct_fields__[4:], "display_name")
    found = {name: getattr(options, name) for name in names}
    return {
        name: None if value == NONE else value for name, value in found.items() if value is not None
    }
