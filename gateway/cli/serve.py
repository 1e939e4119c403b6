"""python -m gateway serve: runs the gateway"""

import argparse
import gc
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from uvicorn.config import STARTUP_FAILURE

from gateway.app import create_app
from gateway.base.logs import configure, get_logger
from gateway.base.settings import MAX_WORKERS, Settings, SettingsError, load, misspelt
from gateway.cli.arguments import Commands
from gateway.cli.left import warn_of_left
from gateway.cli.parent import run_parent
from gateway.http.accepting import Board
from gateway.http.admitted import raise_descriptor_limit
from gateway.http.machine import Place
from gateway.http.server import Server
from gateway.http.share import share_of
from gateway.limits.workers import SWITCH_SECONDS
from gateway.turn.room import Room

# The collector would walk again and again through objects that live on. Requests leave few cycles,
# so it waits for this many new objects, and then for this many rounds.
_GC_THRESHOLDS = (20_000, 50, 50)


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="run the gateway")
    parser.add_argument("--workers", type=int, metavar="N", help="default: HOLDFAST_WORKERS")
    # What the parent gives to a worker: its number and that of all workers, and descriptors of the
    # port, of the socket to the parent, of the counts of connections and of the room at engines.
    parser.add_argument("--worker", type=int, nargs=6, help=argparse.SUPPRESS)
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    settings = load()
    raise_descriptor_limit()
    configure(settings.log_level)
    if options.worker is not None:
        number, num_workers, listening, parent, counts, room = options.worker
        board = Board(counts, num_workers)
        return _run(
            share_of(settings, num_workers),
            Place(number, num_workers, socket.socket(fileno=parent), Room(room, num_workers)),
            [socket.socket(fileno=listening)],
            partial(board.tell, number),
        )
    for line in misspelt(os.environ):
        get_logger("gateway").warning("setting_unknown", error=line)
    num_workers = settings.workers if options.workers is None else options.workers
    if not 1 <= num_workers <= MAX_WORKERS:
        raise SettingsError(f"--workers: must be between 1 and {MAX_WORKERS}: {num_workers}")
    try:
        socket.getaddrinfo(settings.host, settings.port)
    except (OSError, UnicodeError):  # the second is of a name that is too long
        raise SettingsError("HOLDFAST_HOST: must be an address of this machine") from None
    if num_workers > 1:
        return run_parent(settings, num_workers)
    warn_of_left(settings.data, num_workers)
    return _run(settings)


def _run(
    settings: Settings,
    place: Place | None = None,
    sockets: list[socket.socket] | None = None,
    has_most: Callable[[int], bool] = lambda _: False,
) -> int:
    app = create_app(settings, place=place)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, settings, has_most)
    with suppress(KeyboardInterrupt):
        server.run(sockets)
    return 0 if server.started else STARTUP_FAILURE
