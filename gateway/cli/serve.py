"""python -m gateway serve: runs the gateway"""

import argparse
import gc
import sys
from contextlib import suppress

from uvicorn.config import STARTUP_FAILURE

from gateway.app import create_app
from gateway.base.logs import configure
from gateway.base.settings import load
from gateway.cli.arguments import Commands
from gateway.http.admitted import raise_descriptor_limit
from gateway.http.server import Server
from gateway.limits.workers import SWITCH_SECONDS

# The collector would walk again and again through objects that live on. Requests leave few cycles,
# so it waits for this many new objects, and then for this many rounds.
_GC_THRESHOLDS = (20_000, 50, 50)


def add_commands(commands: Commands) -> None:
    commands.add_parser("serve", help="run the gateway").set_defaults(run=_serve)


def _serve(_: argparse.Namespace) -> int:
    settings = load()
    raise_descriptor_limit()
    configure(settings.log_level)
    app = create_app(settings)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, settings)
    with suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else STARTUP_FAILURE
