"""python -m gateway keys | workspaces: who may ask, and how much"""

import argparse
import sys
from typing import Any, get_args

from gateway.admin.structs.fleet import KeyScope, Workspace
from gateway.base.clock import Clock
from gateway.cli.arguments import (
    NONE,
    Commands,
    add_actions,
    add_auto_cache,
    aware_moment,
    count,
    given,
    nano,
    or_none,
    seconds,
    share,
    shown,
)
from gateway.cli.upkeep import run_in_ledger
from gateway.ledger.access import DEFAULT_WORKSPACE, ApiKey, Keys, Workspaces, new_key
from gateway.ledger.database import Ledger
from gateway.limits.keyring import EFFECTIVE_SECONDS
from gateway.prices.money import NanoDollars, dollars

_DAY_SECONDS = 86_400.0


def add_commands(commands: Commands) -> None:
    actions = add_actions(commands, "keys", "manage API keys")
    create = actions.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--workspace", default=DEFAULT_WORKSPACE, help="created when absent")
    create.add_argument("--name", default="unnamed")
    create.add_argument("--scope", choices=get_args(KeyScope), default="inference")
    create.add_argument(
        "--expires-at", type=aware_moment, metavar="TIME", help="such as 2027-01-31T00Z"
    )
    create.set_defaults(run=_create_key)
    add_auto_cache(create)
    change = actions.add_parser("set", help="change what is held of a key's requests")
    change.add_argument("id")
    add_auto_cache(change)
    change.set_defaults(run=_change_key)
    listed = actions.add_parser("list", help="list keys, without their secrets")
    listed.add_argument("--workspace")
    listed.set_defaults(run=_list_keys)
    rotate = actions.add_parser("rotate", help="make a key's successor and print it, this once")
    rotate.add_argument("id")
    rotate.add_argument(
        "--grace-seconds",
        type=or_none(seconds),
        default=_DAY_SECONDS,
        help="how long the old key works on (a day); `none`: until it is revoked",
    )
    rotate.set_defaults(run=_rotate_key)
    revoke = actions.add_parser("revoke", help="end a key")
    revoke.add_argument("id")
    revoke.set_defaults(run=_revoke_key)
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


def _create_key(options: argparse.Namespace) -> int:
    key, now = new_key(), Clock().wall()
    if options.expires_at is not None and options.expires_at <= now:
        print("--expires-at: must be in the future", file=sys.stderr)
        return 2
    policy = given(options, "auto_cache", "auto_cache_ttl")

    async def create(ledger: Ledger) -> str:
        keys = Keys(ledger)
        key_id = await keys.create(
            key,
            options.workspace,
            options.name,
            now,
            scope=options.scope,
            expires_at=options.expires_at,
        )
        if policy:
            await keys.change(key_id, policy)
        return key_id

    print(run_in_ledger(create), key)
    return 0


def _change_key(options: argparse.Namespace) -> int:
    policy = given(options, "auto_cache", "auto_cache_ttl")
    key = run_in_ledger(lambda ledger: Keys(ledger).change(options.id, policy))
    print(key.id, *_policy(key))
    print(f"counts on every gateway within {EFFECTIVE_SECONDS} seconds", file=sys.stderr)
    return 0


def _policy(key: ApiKey) -> tuple[str, str]:
    return f"auto_cache={shown(key.auto_cache)}", f"auto_cache_ttl={shown(key.auto_cache_ttl)}"


def _list_keys(options: argparse.Namespace) -> int:
    now = Clock().wall()
    for key in run_in_ledger(lambda ledger: Keys(ledger).all(options.workspace)):
        state = "active" if key.works(now) else "revoked" if key.revoked_at else "expired"
        print(
            key.id,
            key.workspace,
            key.name,
            state,
            key.created_at.isoformat(),
            key.scope,
            f"expires={shown(key.expires_at)}",
            f"last_used={shown(key.last_used_at)}",
            *_policy(key),
        )
    return 0


def _rotate_key(options: argparse.Namespace) -> int:
    key, now = new_key(), Clock().wall()
    grace = None if options.grace_seconds == NONE else options.grace_seconds
    made = run_in_ledger(lambda ledger: Keys(ledger).rotate(options.id, key, now, grace))
    print(made.id, key)
    until = "until it is revoked" if grace is None else f"for {grace:g} more seconds"
    print(f"`{options.id}` works {until}", file=sys.stderr)
    return 0


def _revoke_key(options: argparse.Namespace) -> int:
    if run_in_ledger(lambda ledger: Keys(ledger).revoke(options.id, Clock().wall())):
        print(f"revoked; every gateway refuses it within {EFFECTIVE_SECONDS} seconds")
        return 0
    print(f"no active key `{options.id}`", file=sys.stderr)
    return 1


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
    return given(options, *Workspace.__struct_fields__[4:], "display_name")
