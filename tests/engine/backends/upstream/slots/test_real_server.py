"""Leases over a real `llama-server`: `scripts/long_tests llamacpp` builds one and runs this.

Most run over small models, our demo model among them. What is timed runs over SmolLM2.
"""

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conformance.engines import Answer, Engine, prompt
from tests.engine.backends.upstream.conftest import wait_until
from tests.engine.backends.upstream.slots.real import (
    FLAGS,
    SMOLLM2,
    Real,
    engine_of,
    needs_server,
    serving,
)
from tests.engine.backends.upstream.test_restarts import epoch_of

pytestmark = needs_server
SYSTEM_TOKENS = 24
"""Prompts of SmolLM2 begin with a system message of its template. A slot has it of its tenant's
prompt before."""


def flood(engine: Engine) -> None:
    """Other scopes use every slot."""
    for _ in range(4):
        engine.ask(prompt(engine.text(60)), engine.scope())


def write(engine: Engine, scope: str, shared: str) -> int:
    usage = engine.ask(prompt(shared, "one"), scope, (0, "1h")).usage
    assert usage.cache_write_1h_tokens == engine.ends(prompt(shared, "one"))[0]
    return usage.cache_write_1h_tokens


def read(engine: Engine, scope: str, shared: str, tail: str = "two") -> int:
    return engine.ask(prompt(shared, tail), scope, (0, "1h")).usage.cache_read_tokens


def lease_note(engine: Engine) -> tuple[bool, str]:
    (promise,) = [
        guarantee for guarantee in engine.description.guarantees if guarantee.name == "hold"
    ]
    return promise.is_kept, promise.note


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with serving(Real(tmp_path_factory.mktemp("llama") / "slots")) as server:
        yield server


@pytest.fixture(scope="module")
def engine(real: Real) -> Iterator[Engine]:
    with engine_of(real, CLOCK="manual") as running:
        yield running


def test_marks_survive_a_flood_and_kills_of_either(tmp_path: Path) -> None:
    with serving(Real(tmp_path / "slots", SMOLLM2)) as real:
        with engine_of(real) as engine:
            assert engine.keeps("hold"), engine.description.guarantees
            scope = engine.scope()
            shared = engine.text(300)
            written_tokens = write(engine, scope, shared)
            flood(engine)
            assert read(engine, scope, shared) == written_tokens
            assert read(engine, engine.scope(), shared) == 0, "another workspace"
            before = epoch_of(engine)
            real.kill()
            real.start()
            wait_until(lambda: epoch_of(engine) not in (None, before), 300)
            assert read(engine, scope, shared) == written_tokens
            engine.process.kill()
            wait_until(lambda: engine.process.poll() is not None)
        with engine_of(real) as engine:
            assert read(engine, scope, shared) == written_tokens
            store = engine.stats().store
            assert store is not None and store.restored_leases == 2
            assert store.lost_leases == 0


MODELS = [("full", ()), ("window", ("--swa-full",)), ("hybrid", ())]


@pytest.mark.parametrize(("model", "more_flags"), MODELS, ids=[model for model, _ in MODELS])
def test_four_marks_are_computed_once_and_read_exactly(
    tmp_path: Path, model: str, more_flags: tuple[str, ...]
) -> None:
    """And an answer behind a file is the one that was given when the file was written."""
    with (
        serving(Real(tmp_path / "slots", model, flags=(*FLAGS, *more_flags))) as real,
        engine_of(real) as engine,
    ):
        assert engine.keeps("hold"), engine.description.guarantees
        scope = engine.scope()
        texts = [engine.text(count) for count in (120, 90, 70, 50)]
        whole = prompt(*texts, "What?")
        ends = engine.ends(whole)
        first = engine.ask(whole, scope, *((n, "1h") for n in range(4)), max_tokens=12)
        assert first.usage.cache_write_1h_tokens == ends[3]
        assert first.usage.computed_tokens == engine.count(whole).input_tokens
        flood(engine)
        again = engine.ask(whole, scope, (3, "1h"), max_tokens=12)
        assert again.usage.cache_read_tokens == ends[3]
        assert again.text() == first.text()
        for count in range(4):
            flood(engine)
            conversation = prompt(*texts[: count + 1], "Other?")
            usage = engine.ask(conversation, scope, (count, "1h")).usage
            assert usage.cache_read_tokens == ends[count]


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_file_never_reaches_the_server(real: Real, engine: Engine, how: str) -> None:
    scope = engine.scope()
    shared = engine.text(200)
    before = set(real.folder.glob("hf-*.bin"))
    write(engine, scope, shared)
    (file,) = set(real.folder.glob("hf-*.bin")) - before
    content = bytearray(file.read_bytes())
    if how == "truncated":
        del content[-100:]
    else:
        content[-1000] ^= 1
    file.write_bytes(content)
    flood(engine)
    again = engine.ask(prompt(shared, "two"), scope, (0, "1h"))
    assert (again.usage.cache_read_tokens, again.started.miss_reason) == (0, "damaged")
    assert again.started.breakpoints[0].state == "leased"
    real.assert_alive()


def test_a_read_refreshes_a_lease_and_its_end_erases_file_and_slot(
    real: Real, engine: Engine
) -> None:
    scope = engine.scope()
    shared = engine.text(150)
    before = set(real.folder.glob("hf-*.bin"))

    def ask(tail: str) -> Answer:
        return engine.ask(prompt(shared, tail), scope, (0, "5m"))

    num_written = ask("one").usage.cache_write_5m_tokens
    (file,) = set(real.folder.glob("hf-*.bin")) - before
    for tail in ("two", "three"):
        engine.advance(200)
        assert ask(tail).usage.cache_read_tokens == num_written > 0
    engine.advance(299)
    assert [entry.state for entry in engine.entries(scope)] == ["leased"]
    engine.advance(1)
    assert engine.entries(scope) == []
    engine.advance(60)
    wait_until(lambda: not file.exists())
    after = ask("four")
    assert (after.usage.cache_read_tokens, after.usage.automatic_tokens) == (0, 0)
    assert after.started.miss_reason == "ttl_expired"
    assert after.usage.cache_write_5m_tokens == num_written
    real.assert_alive()


ALL_FLAGS = [
    ("full", (*FLAGS, "--kv-unified"), "--kv-unified", True),
    ("full", (*FLAGS, "--no-slots"), "--no-slots", True),
    ("full", ("--cache-ram", "64", "--no-cache-idle-slots"), "--cache-ram 0", False),
    ("full", (), "--cache-ram 0", False),
    ("window", FLAGS, "--swa-full", True),
]


@pytest.mark.parametrize(("model", "flags", "named", "is_isolated"), ALL_FLAGS)
def test_a_wrong_flag_is_named_and_the_server_is_used_without_leases(
    tmp_path: Path, model: str, flags: tuple[str, ...], named: str, is_isolated: bool
) -> None:
    real = Real(tmp_path / "slots", model, flags=flags)
    with serving(real), engine_of(real) as engine:
        is_kept, note = lease_note(engine)
        assert not is_kept and named in note
        assert engine.keeps("isolation") == is_isolated
        store = engine.stats().store
        assert store is not None and named in (store.problem or "")
        scope = engine.scope()
        shared = engine.text(200)
        answer = engine.ask(prompt(shared, "one"), scope, (0, "1h"), max_tokens=4)
        assert answer.started.breakpoints[0].reason == "no_hold"
        assert answer.finished[0].output_tokens == 4
        assert not list(real.folder.glob("hf-*"))


def first_token_seconds(engine: Engine, scope: str, shared: str) -> tuple[float, Answer]:
    since = time.monotonic()
    answer = engine.ask(prompt(shared, engine.text(5)), scope, (0, "1h"))
    return time.monotonic() - since, answer


def test_three_tenants_get_nothing_of_each_other_not_even_time(tmp_path: Path) -> None:
    """What one tenant has sent is no faster for another than what nobody has."""
    cold = list[float]()
    foreign = list[float]()
    warm = list[float]()
    with serving(Real(tmp_path / "slots", SMOLLM2)) as real, engine_of(real) as engine:
        tenants = [engine.scope() for _ in range(3)]
        for owner in [0, 1, 2, 0, 1]:
            shared = engine.text(500)
            seconds, answer = first_token_seconds(engine, tenants[owner], shared)
            assert answer.usage.cache_read_tokens == 0
            cold.append(seconds)
            seconds, answer = first_token_seconds(engine, tenants[owner], shared)
            assert answer.usage.cache_read_tokens > 0
            warm.append(seconds)
            for neighbour in {0, 1, 2} - {owner}:
                seconds, answer = first_token_seconds(engine, tenants[neighbour], shared)
                usage = answer.usage
                assert usage.cache_read_tokens == 0
                assert usage.automatic_tokens <= SYSTEM_TOKENS
                foreign.append(seconds)
                engine.drop(tenants[neighbour])
    print(f"cold {cold}, another's {foreign}, own {warm}")
    assert statistics.median(warm) < 0.4 * statistics.median(cold), "it can be told at all"
    assert statistics.median(foreign) > 0.75 * statistics.median(cold)


def test_eight_clients_at_once(real: Real, engine: Engine) -> None:
    scopes = [engine.scope() for _ in range(3)]
    shared = [engine.text(150 + 20 * n) for n in range(3)]
    ends = [engine.ends(prompt(text, "x"))[0] for text in shared]
    tails = [engine.text(5 + n % 9) for n in range(64)]

    def ask(number: int) -> tuple[int, int]:
        tenant = number % 3
        conversation = prompt(shared[tenant], tails[number])
        answer = engine.ask(conversation, scopes[tenant], (0, "1h"), max_tokens=6)
        assert answer.finished[0].output_tokens
        return answer.usage.cache_read_tokens, answer.usage.cache_write_1h_tokens

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(ask, range(len(tails))))
    for number, (num_read, num_written) in enumerate(counts):
        assert sorted((num_read, num_written)) == [0, ends[number % 3]]
    assert sum(num_read > 0 for num_read, _ in counts) > len(tails) // 2
    real.assert_alive()


def test_a_long_prompt_of_one_tenant_loses_nobody_anything(tmp_path: Path) -> None:
    """`GET /slots` waits while the server computes a batch of 2,048 tokens: the engine took that
    for a server that was gone."""
    with serving(Real(tmp_path / "slots", SMOLLM2)) as real, engine_of(real) as engine:
        scope = engine.scope()
        shared = engine.text(200)
        written_tokens = write(engine, scope, shared)
        before = epoch_of(engine)
        long_text = engine.text(5000)
        with ThreadPoolExecutor(1) as pool:
            long_turn = pool.submit(engine.ask, prompt(long_text), engine.scope(), (0, "1h"))
            while not long_turn.done():
                assert read(engine, scope, shared, engine.text(5)) == written_tokens
            assert long_turn.result().started.breakpoints[0].state == "leased"
        assert epoch_of(engine) == before


def test_somebody_elses_request_in_a_slot(real: Real, engine: Engine) -> None:
    scope = engine.scope()
    shared = engine.text(200)
    written_tokens = write(engine, scope, shared)
    ends = threading.Event()

    def use() -> None:
        body = {"prompt": "Once", "id_slot": 0, "n_predict": -1, "stream": True, "ignore_eos": True}
        url = f"{real.url}/completion"
        with httpx.stream("POST", url, json=body, timeout=600, trust_env=False) as response:
            for _ in response.iter_bytes():
                if ends.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        using = pool.submit(use)
        wait_until(lambda: httpx.get(f"{real.url}/slots").json()[0]["is_processing"])
        for _ in range(4):
            assert read(engine, scope, shared, engine.text(5)) == written_tokens
            flood(engine)
        assert engine.stats().slots_away == 1
        ends.set()
        using.result()
    wait_until(lambda: not engine.stats().slots_away)
    flood(engine)
    assert read(engine, scope, shared) == written_tokens


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a disk can't be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_leases_nothing_and_serves_all(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        serving(Real(disk / "slots", log=tmp_path / "log")) as real,
        engine_of(real, CLOCK="manual") as engine,
    ):
        scope = engine.scope()
        shared = engine.text(200)
        written_tokens = write(engine, scope, shared)
        filler = disk / "filler"
        with suppress_full_disk(), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        answer = engine.ask(prompt(engine.text(300)), engine.scope(), (0, "1h"), max_tokens=4)
        assert answer.started.breakpoints[0].state == "best_effort"
        assert answer.started.breakpoints[0].reason == "no_hold"
        assert answer.finished[0].output_tokens == 4
        store = engine.stats().store
        assert store is not None and not store.is_up and store.problem
        wait_until(lambda: not list(real.folder.glob("*.part")))
        real.assert_alive()
        flood(engine)
        assert read(engine, scope, shared) == written_tokens, "what was there is read"
        filler.unlink()
        engine.advance(60)
        again = engine.ask(prompt(engine.text(300)), engine.scope(), (0, "1h"))
        assert again.started.breakpoints[0].state == "leased"
        wait_until(lambda: (engine.stats().store or store).is_up)


@contextmanager
def suppress_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        assert error.strerror == "No space left on device"
