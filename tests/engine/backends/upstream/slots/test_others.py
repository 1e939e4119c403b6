"""Somebody else uses a slot of the server or removes a file, or a slot doesn't come to rest."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.protocol import Failed
from tests.conformance.engines import Engine, prompt, running_engine
from tests.engine.backends.upstream.conftest import wait_until
from tests.engine.backends.upstream.scripted import serving_script
from tests.engine.backends.upstream.slots.conftest import files_of
from tests.engine.backends.upstream.slots.scripted_slots import FileScript, ScriptedSlots

ALL = {0, 1}


@pytest.fixture(scope="module")
def running(script: FileScript) -> Iterator[Engine]:
    with serving_script(script, ScriptedSlots) as url:
        settings = {
            "BACKEND": "upstream",
            "UPSTREAM": url,
            "UPSTREAM_SLOTS": str(script.folder),
            "CLOCK": "manual",
            "MIN_CACHE_TOKENS": 32,
        }
        module = "tests.engine.backends.upstream.slots.impatient"
        with running_engine("upstream", settings, module) as engine:
            yield engine


@pytest.fixture
def engine(running: Engine, script: FileScript) -> Iterator[Engine]:
    yield running
    script.processing.clear()
    script.ends_late.clear()
    wait_until(lambda: not running.stats().slots_away)
    running.wait_until_idle()
    assert not script.seen_busy, "a slot was touched while something ran in it"


def written(engine: Engine, scope: str, shared: str) -> int:
    usage = engine.ask(prompt(shared, "one"), scope, (0, "1h")).usage
    return usage.cache_write_1h_tokens


def read(engine: Engine, scope: str, shared: str) -> int:
    return engine.ask(prompt(shared, "two"), scope, (0, "1h")).usage.cache_read_tokens


def test_a_request_goes_to_a_slot_that_nobody_uses(engine: Engine, script: FileScript) -> None:
    scope = engine.scope()
    shared = engine.text(90)
    num_written = written(engine, scope, shared)
    script.processing.add(0)
    for _ in range(3):
        assert read(engine, scope, shared) == num_written
        engine.ask(prompt(engine.text(60)), engine.scope())
    # The first request may not have left it yet: then it takes a while.
    wait_until(lambda: engine.stats().slots_away == 1)
    script.processing.discard(0)
    wait_until(lambda: not engine.stats().slots_away)
    assert read(engine, scope, shared) == num_written


def test_without_a_slot_requests_wait_a_while_and_then_say_why(
    engine: Engine, script: FileScript
) -> None:
    scope = engine.scope()
    shared = engine.text(90)
    num_written = written(engine, scope, shared)
    script.processing |= ALL
    with ThreadPoolExecutor(4) as pool:
        conversations = [prompt(shared, engine.text(5 + n)) for n in range(4)]
        answers = list(pool.map(lambda words: engine.ask(words, scope, (0, "1h")), conversations))
    for answer in answers:
        assert isinstance(answer.last, Failed)
        assert answer.last.code == "overloaded"
        assert "used by somebody else" in answer.last.message
    assert engine.stats().slots_away == len(ALL)
    assert engine.stats().waiting == 0
    at_once = engine.ask(prompt(shared, "at once"), scope, (0, "1h"))
    assert isinstance(at_once.last, Failed)
    script.processing.clear()
    wait_until(lambda: not engine.stats().slots_away)
    assert read(engine, scope, shared) == num_written


def test_a_request_that_waited_gets_the_slot_that_comes_back(
    engine: Engine, script: FileScript
) -> None:
    script.processing |= ALL
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.ask, prompt(engine.text(60)), engine.scope(), (0, "1h"))
        wait_until(lambda: engine.stats().slots_away == len(ALL))
        script.processing.discard(1)
        assert future.result().started.breakpoints[0].state == "leased"


def test_a_slot_that_goes_on_behind_its_answer_is_not_used(
    engine: Engine, script: FileScript
) -> None:
    script.ends_late |= ALL
    scope = engine.scope()
    shared = engine.text(90)
    usage = engine.ask(prompt(shared, "one"), scope, (0, "1h"), max_tokens=2).usage
    num_written = usage.cache_write_1h_tokens
    assert num_written
    wait_until(lambda: engine.stats().slots_away == 1)
    script.ends_late.clear()
    assert read(engine, scope, shared) == num_written
    script.processing.clear()
    wait_until(lambda: not engine.stats().slots_away)


def written_file(engine: Engine, script: FileScript, scope: str, shared: str) -> Path:
    before = set(files_of(script.folder))
    assert written(engine, scope, shared)
    (new,) = set(files_of(script.folder)) - before
    return new


@pytest.mark.parametrize("how", ["removed", "cut short"])
def test_a_lease_that_nobody_reads_ends_when_its_file_is_gone(
    engine: Engine, script: FileScript, how: str
) -> None:
    """Pages and counts went on to call it leased."""
    scope = engine.scope()
    shared = engine.text(90)
    other = engine.scope()
    written(engine, other, engine.text(80))
    file = written_file(engine, script, scope, shared)
    num_damaged = engine.stats().counters.leases_damaged
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    wait_until(lambda: not engine.entries(scope))
    stats = engine.stats()
    assert stats.counters.leases_damaged == num_damaged + 1
    assert [entry.state for entry in engine.entries(other)] == ["leased"]
    assert stats.store is not None and stats.store.leases == stats.num_leases
    wait_until(lambda: not file.exists())
    again = engine.ask(prompt(shared, "two"), scope, (0, "1h"))
    assert (again.usage.cache_read_tokens, again.started.miss_reason) == (0, "damaged")
    assert again.started.breakpoints[0].state == "leased"


def test_a_hit_whose_file_goes_while_its_request_waits_is_a_miss(
    engine: Engine, script: FileScript
) -> None:
    scope = engine.scope()
    shared = engine.text(90)
    file = written_file(engine, script, scope, shared)
    script.processing |= ALL
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(engine.ask, prompt(shared, "two"), scope, (0, "1h"))
        wait_until(lambda: engine.stats().slots_away == len(ALL))
        assert engine.entries(scope)
        file.unlink()
        wait_until(lambda: not engine.entries(scope))
        script.processing.clear()
        answer = future.result()
    assert (answer.usage.cache_read_tokens, answer.started.miss_reason) == (0, "damaged")
    assert answer.started.breakpoints[0].state == "leased"
