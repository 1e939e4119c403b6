"""python -m gateway serve: runs the gateway"""

import argparse
import gc
import os
import socket
import sys
from contextlib import suppress

from uvicorn.config import STARTUP_FAILURE

from engine.asgi import raise_descriptor_limit
from engine.variables import misspelt
from gateway.admission.workers import SWITCH_SECONDS
from gateway.app import create_app
from gateway.base.logs import configure, get_logger
from gateway.base.settings import PREFIX, Settings, SettingsError, load
from gateway.cli.arguments import Commands
from gateway.http.server import Server

# The thresholds of the garbage collector: the number of new objects, and for each older generation
# the rounds of the generation before. With lower ones it would walk again and again through objects
# that live on. Connections and requests leave no cycles (`tests/gateway/http/test_memory.py`).
_GC_THRESHOLDS = (20_000, 50, 50)


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="run the gateway")
    parser.set_defaults(run=_serve)


def _serve(_: argparse.Namespace) -> int:
    settings = load()
    raise_descriptor_limit()
    configure(settings.log_level)
    for line in misspelt(os.environ, [PREFIX + name.upper() for name in Settings.model_fields]):
        get_logger("gateway").warning("setting_unknown", error=line)
    try:
        socket.getaddrinfo(settings.host, settings.port)
    except (OSError, UnicodeError):  # a name that is too long raises UnicodeError
        raise SettingsError("HOLDFAST_HOST: must be an address of this machine") from None
    app = create_app(settings)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, settings)
    with suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else STARTUP_FAILURE
