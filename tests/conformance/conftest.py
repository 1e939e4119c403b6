"""One process per backend and profile for the whole session, started when first needed."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from engine.protocol import EntryInfo
from tests.conformance.engines import PROFILES, Engine, Settings, running_engine

BACKENDS = ("synthetic", "native")
Fleet = Callable[[str, str], Engine]


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The engine of a backend and a profile; profiles that are equal for it share one."""
    running: dict[tuple[str, str], Engine] = {}
    with ExitStack() as stack:

        def engine_of(backend: str, profile: str) -> Engine:
            settings = settings_of(backend, profile)
            key = (backend, repr(sorted(settings.items())))
            if key not in running:
                running[key] = stack.enter_context(running_engine(backend, settings))
            return running[key]

        yield engine_of


def settings_of(backend: str, profile: str) -> Settings:
    """A profile's settings that say anything to this backend."""
    settings = dict(PROFILES[profile])
    if backend != "synthetic":
        settings = {k: v for k, v in settings.items() if not k.startswith("SYNTHETIC_")}
        settings["THREADS"] = 1
    return settings


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "native" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return name


def checked(engine: Engine) -> Iterator[Engine]:
    """After each test the engine lives, rests, and holds no block but by leases."""
    yield engine
    assert engine.process.poll() is None, "the engine died"
    engine.wait_until_idle()


@pytest.fixture
def engine(fleet: Fleet, backend: str) -> Iterator[Engine]:
    """Room for everybody; the synthetic one answers at once."""
    yield from checked(fleet(backend, "fast"))


@pytest.fixture
def slow_engine(fleet: Fleet, backend: str) -> Iterator[Engine]:
    """Takes a moment per step, so that something can happen in between."""
    yield from checked(fleet(backend, "slow"))


@pytest.fixture
def tiny_engine(fleet: Fleet, backend: str) -> Iterator[Engine]:
    """Sixteen blocks of sixteen tokens, half of them for leases."""
    engine = fleet(backend, "tiny")
    for entry in engine.get("entries", list[EntryInfo]):
        engine.drop(entry.scope)
    yield from checked(engine)
