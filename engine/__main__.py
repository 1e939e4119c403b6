"""`python -m engine`: one engine on one port. Settings: the environment, see SETTINGS.md.

`python -m engine profile-variant` measures a model against a sibling and ends.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

import structlog
from pydantic import ValidationError
from uvicorn.config import STARTUP_FAILURE

from engine.backends.base import Parts, Progress
from engine.backends.contract import EngineBackend
from engine.backends.local import LocalBackend
from engine.clock import Clock, ManualClock, MonotonicClock
from engine.lines import LineLoggers
from engine.serve.connections import Server
from engine.serve.health import ServedEngine
from engine.serve.server import create_app
from engine.settings import PREFIX, Settings, problems_of
from engine.variables import misspelt

log = structlog.get_logger()

_STDOUT = 1

SWITCH_SECONDS = 0.0001
"""A thread that wants the interpreter's lock gets it after this time, a fiftieth of Python's
default. A step of the model takes the lock anew for each of its hundreds of operations."""


def _configure_log(settings: Settings) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.log_level.upper()]
        ),
        logger_factory=LineLoggers(_STDOUT),
        cache_logger_on_first_use=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["profile-variant"]:
        from engine.backends.sibling import main as profile_variant

        return profile_variant(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        description="One engine on one port. Settings: the environment, see engine/SETTINGS.md.",
    )
    parser.add_argument("--backend", choices=["native", "synthetic", "vllm", "upstream"])
    backend = parser.parse_args(arguments).backend
    try:
        settings = Settings(**({"backend": backend} if backend else {}))
    except ValidationError as error:
        print(*problems_of(error), sep="\n", file=sys.stderr)
        return 2
    try:
        socket.getaddrinfo(settings.host, settings.port)
    except (OSError, UnicodeError):  # the second is of a name that is too long
        print("ENGINE_HOST: must be an address of this machine", file=sys.stderr)
        return 2
    _configure_log(settings)
    for line in misspelt(os.environ, [PREFIX + name.upper() for name in Settings.model_fields]):
        log.warning("setting_unknown", error=line)
    sys.setswitchinterval(SWITCH_SECONDS)
    if settings.clock == "manual":
        log.warning("THE CLOCK IS MANUAL: for tests only")
    failed: list[bool] = []

    def fail() -> None:
        failed.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    def end(_signal: int, _frame: FrameType | None) -> None:
        # sys.exit would wait for a model that is loading in its thread.
        os._exit(1 if failed else 0)

    # uvicorn handles the signal while it serves, and raises it again at the end.
    signal.signal(signal.SIGTERM, end)
    host = ServedEngine(fail, load_seconds=settings.load_seconds)
    app = create_app(
        backend_factory(settings),
        settings.secret.get_secret_value(),
        host,
        as_vllm=settings.vllm_metrics,
    )
    server = Server(app, host, settings)
    with suppress(KeyboardInterrupt):
        server.run()
    if failed:
        return 1
    return 0 if server.started else STARTUP_FAILURE


def backend_factory(settings: Settings) -> Callable[[ServedEngine], EngineBackend]:
    """A function that makes the settings' backend when the server starts."""
    clock: Clock = ManualClock() if settings.clock == "manual" else MonotonicClock()
    if settings.backend == "vllm":
        from engine.backends.vllm.backend import VllmBackend

        return lambda host: VllmBackend(settings, clock, host.crash, host.supervisor)
    if settings.backend == "upstream":
        from engine.backends.upstream.backend import UpstreamBackend

        return lambda host: UpstreamBackend(settings, clock, host.crash, host.supervisor)
    # torch is imported only for backends that use it. The synthetic engine starts without it.
    load_parts: Callable[[Settings, Progress], Parts]
    if settings.backend == "synthetic":
        from engine.backends.synthetic import load_synthetic as load_parts
    else:
        from engine.backends.native import load_native as load_parts
    return lambda host: LocalBackend(settings, clock, load_parts, host.crash)


if __name__ == "__main__":
    sys.exit(main())
