"""python -m gateway purge: a gateway that runs removes a workspace's content everywhere"""

import argparse

from gateway.base.settings import load
from gateway.cli.arguments import Commands, UsageError
from gateway.cli.running import PATIENT_SECONDS, add_url, ask, url_of
from gateway.structs.fleet import PurgeReport


def add_commands(commands: Commands) -> None:
    purge = commands.add_parser(
        "purge", help="remove a workspace's content from engines, journal and database"
    )
    what = purge.add_mutually_exclusive_group(required=True)
    what.add_argument("--workspace", metavar="NAME")
    what.add_argument("--model", metavar="NAME", help="all that this model's engines hold")
    add_url(purge)
    purge.set_defaults(run=_purge)


def _purge(options: argparse.Namespace) -> int:
    """Purge, and print the report. Return 1 where something is left."""
    key = load().admin_key
    if key is None:
        raise UsageError("HOLDFAST_ADMIN_KEY: is not set; `purge` asks the admin API with it")
    names = {"workspace": options.workspace, "model": options.model}
    body = {name: value for name, value in names.items() if value is not None}
    report = ask(
        url_of(options),
        "/admin/v1/purge",
        PurgeReport,
        key=key.get_secret_value(),
        body=body,
        seconds=PATIENT_SECONDS,
    )
    for engine in report.engines:
        if engine.purged:
            print(
                f"{engine.engine}: {engine.entries} entries, {engine.device_blocks} blocks of the"
                f" device, {engine.host_blocks} of the host, {engine.files} files"
            )
    if report.workspace is not None:
        print(f"journal: {report.journal_contents} contents")
        for kind, number in report.database.items():
            print(f"database: {number} {kind}")
    for text in report.left:
        print(f"left: {text}")
    return 1 if report.left else 0
