"""One engine in front of one scripted server, for the whole module."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.conformance.engines import Engine, running_engine
from tests.engine.backends.upstream.scripted import Script, serving_script


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def running(script: Script) -> Iterator[Engine]:
    with serving_script(script) as url, engine_before(url) as engine:
        yield engine


def engine_before(url: str, **more: str | int | float) -> AbstractContextManager[Engine]:
    settings = {"UPSTREAM": url, "CLOCK": "manual", "MIN_CACHE_TOKENS": 32, **more}
    return running_engine("upstream", settings)


@pytest.fixture
def engine(running: Engine, script: Script) -> Iterator[Engine]:
    yield running
    script.fault = None
    assert running.process.poll() is None, "the engine died"
    running.wait_until_idle()


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    since = time.monotonic()
    while not is_so():
        assert time.monotonic() - since < seconds, "it did not come about"
        time.sleep(0.02)
