"""python -m gateway keys … | workspaces …"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar, get_args

from gateway.base.clock import Clock
from gateway.base.grants import KeyScope
from gateway.base.settings import load_database
from gateway.ledger.database import Ledger
from gateway.ledger.keys import Keys, new_key
from gateway.ledger.workspaces import DEFAULT_WORKSPACE, Workspace, Workspaces
from gateway.limits.keyring import EFFECTIVE_SECONDS
from gateway.prices.money import NanoDollars, dollars

_NANO_PER_DOLLAR = 1_000_000_000
_DAY_SECONDS = 86_400.0
_NONE = "none"

Result = TypeVar("Result")
Commands = Any  # argparse does not name the type of what add_subparsers returns


def add_commands(commands: Commands) -> None:
    """Give the command line its `keys` and `workspaces`."""
    _add_keys(_actions(commands, "keys", "manage API keys"))
    _add_workspaces(_actions(commands, "workspaces", "manage workspaces and their limits"))


def _actions(commands: Commands, name: str, about: str) -> Commands:
    return commands.add_parser(name, help=about).add_subparsers(required=True, metavar="action")


def _add_keys(actions: Commands) -> None:
    create = actions.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--workspace", default=DEFAULT_WORKSPACE, help="created when absent")
    create.add_argument("--name", default="unnamed")
    create.add_argument("--scope", choices=get_args(KeyScope), default="inference")
    create.add_argument("--expires-at", type=_moment, metavar="TIME", help="such as 2027-01-31T00Z")
    create.set_defaults(run=_create_key)
    listed = actions.add_parser("list", help="list keys, without their secrets")
    listed.add_argument("--workspace")
    listed.set_defaults(run=_list_keys)
    rotate = actions.add_parser("rotate", help="make a key's successor and print it, this once")
    rotate.add_argument("id")
    rotate.add_argument(
        "--grace-seconds",
        type=_or_none(_seconds),
        default=_DAY_SECONDS,
        help="how long the old key works on (a day); `none`: until it is revoked",
    )
    rotate.set_defaults(run=_rotate_key)
    revoke = actions.add_parser("revoke", help="end a key")
    revoke.add_argument("id")
    revoke.set_defaults(run=_revoke_key)


def _add_workspaces(actions: Commands) -> None:
    create = actions.add_parser("create", help="make a workspace")
    change = actions.add_parser("set", help="change a workspace's name or limits")
    for parser, run in ((create, _create_workspace), (change, _change_workspace)):
        parser.add_argument("id")
        parser.add_argument("--display-name")
        for name in ("requests-per-minute", "tokens-per-minute", "max-concurrency"):
            parser.add_argument(f"--{name}", type=_or_none(_count), help="or `none`")
        parser.add_argument(
            "--monthly-spend",
            dest="monthly_spend_nano",
            type=_or_none(_nano),
            metavar="DOLLARS",
            help="or `none`",
        )
        parser.add_argument("--lease-share", type=_or_none(_share), help="0 to 1, or `none`")
        parser.set_defaults(run=run)
    actions.add_parser("list", help="list workspaces").set_defaults(run=_list_workspaces)
    for name, about in (("archive", "switch all its keys off"), ("restore", "undo an archive")):
        parser = actions.add_parser(name, help=about)
        parser.add_argument("id")
        parser.set_defaults(run=_archive_workspace, is_archived=name == "archive")


def _create_key(options: argparse.Namespace) -> int:
    key, now = new_key(), Clock().wall()
    if options.expires_at is not None and options.expires_at <= now:
        print("--expires-at: must be in the future", file=sys.stderr)
        return 2
    key_id = _with_ledger(
        lambda ledger: Keys(ledger).create(
            key,
            options.workspace,
            options.name,
            now,
            scope=options.scope,
            expires_at=options.expires_at,
        )
    )
    print(key_id, key)
    return 0


def _list_keys(options: argparse.Namespace) -> int:
    now = Clock().wall()
    for key in _with_ledger(lambda ledger: Keys(ledger).all(options.workspace)):
        state = "active" if key.works(now) else "revoked" if key.revoked_at else "expired"
        print(
            key.id,
            key.workspace,
            key.name,
            state,
            key.created_at.isoformat(),
            key.scope,
            f"expires={_shown(key.expires_at)}",
            f"last_used={_shown(key.last_used_at)}",
        )
    return 0


def _rotate_key(options: argparse.Namespace) -> int:
    key, now = new_key(), Clock().wall()
    grace = None if options.grace_seconds == _NONE else options.grace_seconds
    made = _with_ledger(lambda ledger: Keys(ledger).rotate(options.id, key, now, grace))
    print(made.id, key)
    until = "until it is revoked" if grace is None else f"for {grace:g} more seconds"
    print(f"`{options.id}` works {until}", file=sys.stderr)
    return 0


def _revoke_key(options: argparse.Namespace) -> int:
    if _with_ledger(lambda ledger: Keys(ledger).revoke(options.id, Clock().wall())):
        print(f"revoked; every gateway refuses it within {EFFECTIVE_SECONDS} seconds")
        return 0
    print(f"no active key `{options.id}`", file=sys.stderr)
    return 1


def _create_workspace(options: argparse.Namespace) -> int:
    values, now = _given(options), Clock().wall()
    _print(_with_ledger(lambda ledger: Workspaces(ledger).create(options.id, now, values)))
    return 0


def _change_workspace(options: argparse.Namespace) -> int:
    values = _given(options)
    _print(_with_ledger(lambda ledger: Workspaces(ledger).change(options.id, values)))
    print(f"counts on every gateway within {EFFECTIVE_SECONDS} seconds", file=sys.stderr)
    return 0


def _archive_workspace(options: argparse.Namespace) -> int:
    async def change(ledger: Ledger) -> Workspace:
        workspaces = Workspaces(ledger)
        if options.is_archived:
            return await workspaces.archive(options.id, Clock().wall())
        return await workspaces.restore(options.id)

    _print(_with_ledger(change))
    print(f"counts on every gateway within {EFFECTIVE_SECONDS} seconds", file=sys.stderr)
    return 0


def _list_workspaces(_: argparse.Namespace) -> int:
    for workspace in _with_ledger(lambda ledger: Workspaces(ledger).all()):
        _print(workspace)
    return 0


def _print(workspace: Workspace) -> None:
    spend = workspace.monthly_spend_nano
    print(
        workspace.id,
        "archived" if workspace.archived_at else "active",
        f"name={workspace.display_name!r}",
        f"requests_per_minute={_shown(workspace.requests_per_minute)}",
        f"tokens_per_minute={_shown(workspace.tokens_per_minute)}",
        f"max_concurrency={_shown(workspace.max_concurrency)}",
        f"monthly_spend={_NONE if spend is None else dollars(NanoDollars(spend))}",
        f"lease_share={_shown(workspace.lease_share)}",
    )


def _shown(value: object) -> str:
    if value is None:
        return _NONE
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The columns that were named: None where `none` was said, nothing where nothing was."""
    names = (*Workspace.__struct_fields__[4:], "display_name")
    found = {name: getattr(options, name) for name in names}
    return {
        name: None if value == _NONE else value
        for name, value in found.items()
        if value is not None
    }


def _or_none(read: Callable[[str], Result]) -> Callable[[str], Result | str]:
    return lambda text: _NONE if text == _NONE else read(text)


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 1_000_000_000_000:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number of 1 or more")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 0 to 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 31_536_000:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds up to a year")
    return value


def _nano(text: str) -> int:
    """Dollars, exactly: nothing is rounded."""
    try:
        value = Decimal(text.removeprefix("$")) * _NANO_PER_DOLLAR
    except InvalidOperation:
        value = Decimal(-1)
    if not value.is_finite() or value < 0 or value > 10**18 or value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"`{text}` is not an amount in dollars")
    return int(value)


def _moment(text: str) -> datetime:
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        value = None
    if value is None or value.tzinfo is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not a time with a zone, ISO 8601")
    return value


def _with_ledger(work: Callable[[Ledger], Coroutine[Any, Any, Result]]) -> Result:
    async def run() -> Result:
        ledger = Ledger(load_database().ledger_url)
        try:
            return await work(ledger)
        finally:
            await ledger.close()

    return asyncio.run(run())
