"""python -m gateway keys | workspaces: who may ask, and how much"""

import argparse
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, get_args

from gateway.admission.keyring import EFFECTIVE_SECONDS
from gateway.base.clock import Clock
from gateway.cli.arguments import (
    NONE,
    Commands,
    UsageError,
    add_actions,
    add_auto_cache,
    aware_moment,
    count,
    days,
    given,
    nano,
    or_none,
    seconds,
    share,
    shown,
)
from gateway.cli.upkeep import run_in_ledger
from gateway.ledger.access import AUTO_CACHE, DEFAULT_WORKSPACE, Keys, Workspaces, new_key
from gateway.ledger.database import Ledger
from gateway.prices.price import NanoDollars, dollars
from gateway.structs.fleet import KeyScope, Workspace

_DAY_SECONDS = 86_400.0
_LIMITS = Workspace.__struct_fields__[4:]
_CHANGED = (*_LIMITS, "display_name")
"""The columns of a workspace that options may change."""
Work = Callable[[Workspaces, argparse.Namespace], Coroutine[Any, Any, Workspace]]


def add_commands(commands: Commands) -> None:
    _add_key_commands(commands)
    _add_workspace_commands(commands)


def _add_key_commands(commands: Commands) -> None:
    actions = add_actions(commands, "keys", "manage API keys")
    create = actions.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--workspace", default=DEFAULT_WORKSPACE, help="created when absent")
    create.add_argument("--name", default="unnamed")
    create.add_argument("--scope", choices=get_args(KeyScope), default="inference")
    create.add_argument(
        "--expires-at", type=aware_moment, metavar="TIME", help="such as 2027-01-31T00Z"
    )
    change = actions.add_parser("set", help="change what is held of a key's requests")
    listed = actions.add_parser("list", help="list keys, without their secrets")
    listed.add_argument("--workspace")
    rotate = actions.add_parser("rotate", help="make a key's successor and print it, this once")
    rotate.add_argument(
        "--grace-seconds",
        type=or_none(seconds),
        default=_DAY_SECONDS,
        help="how long the old key works on (a day); `none`: until it is revoked",
    )
    revoke = actions.add_parser("revoke", help="end a key")
    for parser in (change, rotate, revoke):
        parser.add_argument("id")
    for parser in (create, change):
        add_auto_cache(parser)
    create.set_defaults(run=_create_key)
    change.set_defaults(run=_change_key)
    listed.set_defaults(run=_list_keys)
    rotate.set_defaults(run=_rotate_key)
    revoke.set_defaults(run=_revoke_key)


def _add_workspace_commands(commands: Commands) -> None:
    spaces = add_actions(commands, "workspaces", "manage workspaces and their limits")
    make = spaces.add_parser("create", help="make a workspace")
    limit = spaces.add_parser("set", help="change a workspace's name or limits")
    archive = spaces.add_parser("archive", help="switch all its keys off")
    restore = spaces.add_parser("restore", help="undo an archive")
    listed = spaces.add_parser("list", help="list workspaces")
    listed.set_defaults(run=_list_workspaces)
    for parser in (make, limit, archive, restore):
        parser.add_argument("id")
    for parser in (make, limit):
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
        days_help = "how long prompts and answers are kept, or `none` (as it is at first)"
        parser.add_argument("--keep-days", type=or_none(days), help=days_help)
        parser.add_argument("--may-approximate", action=argparse.BooleanOptionalAction)
        add_auto_cache(parser)
    works: tuple[tuple[argparse.ArgumentParser, Work], ...] = (
        (make, lambda all, of: all.create(of.id, Clock().wall(), given(of, *_CHANGED))),
        (limit, lambda all, of: all.change(of.id, given(of, *_CHANGED))),
        (archive, lambda all, of: all.archive(of.id, Clock().wall())),
        (restore, lambda all, of: all.restore(of.id)),
    )
    for parser, work in works:
        parser.set_defaults(run=partial(_workspace, work, parser is not make))


def _create_key(options: argparse.Namespace) -> int:
    key = new_key()
    now = Clock().wall()
    expires = options.expires_at
    if expires is not None and expires <= now:
        raise UsageError("--expires-at: must be in the future")
    policy = given(options, *AUTO_CACHE)

    async def create(ledger: Ledger) -> str:
        keys = Keys(ledger)
        key_id = await keys.create(
            key, options.workspace, options.name, now, scope=options.scope, expires_at=expires
        )
        if policy:
            await keys.change(key_id, policy)
        return key_id

    print(run_in_ledger(create), key)
    return 0


def _change_key(options: argparse.Namespace) -> int:
    policy = given(options, *AUTO_CACHE)
    key = run_in_ledger(lambda ledger: Keys(ledger).change(options.id, policy))
    return _say_when(key.id, *(f"{name}={shown(getattr(key, name))}" for name in AUTO_CACHE))


def _list_keys(options: argparse.Namespace) -> int:
    now = Clock().wall()
    for key in run_in_ledger(lambda ledger: Keys(ledger).all(options.workspace)):
        state = "active" if key.works(now) else "revoked" if key.revoked_at else "expired"
        words = key.id, key.workspace, key.name, state, key.created_at.isoformat(), key.scope
        moments = f"expires={shown(key.expires_at)}", f"last_used={shown(key.last_used_at)}"
        print(*words, *moments, *(f"{name}={shown(getattr(key, name))}" for name in AUTO_CACHE))
    return 0


def _rotate_key(options: argparse.Namespace) -> int:
    key = new_key()
    now = Clock().wall()
    grace = None if options.grace_seconds == NONE else options.grace_seconds
    rotated = run_in_ledger(lambda ledger: Keys(ledger).rotate(options.id, key, now, grace))
    print(rotated.id, key)
    until = "until it is revoked" if grace is None else f"for {grace:g} more seconds"
    print(f"`{options.id}` works {until}", file=sys.stderr)
    return 0


def _revoke_key(options: argparse.Namespace) -> int:
    if run_in_ledger(lambda ledger: Keys(ledger).revoke(options.id, Clock().wall())):
        print(f"revoked; every gateway refuses it within {EFFECTIVE_SECONDS} seconds")
        return 0
    print(f"no active key `{options.id}`", file=sys.stderr)
    return 1


def _workspace(work: Work, is_change: bool, options: argparse.Namespace) -> int:
    words = _words(run_in_ledger(lambda ledger: work(Workspaces(ledger), options)))
    if is_change:
        return _say_when(*words)
    print(*words)
    return 0


def _list_workspaces(_: argparse.Namespace) -> int:
    for workspace in run_in_ledger(lambda ledger: Workspaces(ledger).all()):
        print(*_words(workspace))
    return 0


def _say_when(*words: str) -> int:
    print(*words)
    print(f"counts on every gateway within {EFFECTIVE_SECONDS} seconds", file=sys.stderr)
    return 0


def _words(workspace: Workspace) -> Iterator[str]:
    yield workspace.id
    yield "archived" if workspace.archived_at else "active"
    yield f"name={workspace.display_name!r}"
    for name in _LIMITS:
        value = getattr(workspace, name)
        if name == "monthly_spend_nano":
            name = "monthly_spend"
            value = None if value is None else dollars(NanoDollars(value))
        yield f"{name}={shown(value)}"
