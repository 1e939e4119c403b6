"""A gateway in a process of its own, where a test looks at the process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scripts.stack import Process, serving_gateway
from tests.gateway.serving import ADMIN_KEY, API_KEY


@contextmanager
def gateway_process(
    data: Path, engine: str, log: Path, changes: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Process]]:
    """Start `python -m gateway serve`, wait until an engine is ready, end it whatever happens.

    What it writes goes to `log`; `changes` are further settings.
    """
    settings = {
        "HOLDFAST_API_KEY": API_KEY,
        "HOLDFAST_ADMIN_KEY": ADMIN_KEY,
        "HOLDFAST_ENGINE_SECRET": "engine-secret",
        "HOLDFAST_MASTER_SECRET": "master",
        **(changes or {}),
    }
    with serving_gateway(data, [engine], settings, log) as server:
        yield server.wait().url, server.process
