"""Leases over a real `llama-server`: `scripts/long_tests llamacpp` builds one and runs this.

LLAMA_SERVER is the program, LLAMA_GGUF a model of full attention, LLAMA_MODEL the directory of its
tokenizer.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from scripts.stack import free_port
from tests.conformance.engines import Engine, prompt, running_engine
from tests.engine.backends.upstream.conftest import wait_until
from tests.engine.backends.upstream.test_restarts import epoch_of

PROGRAM = os.environ.get("LLAMA_SERVER", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="LLAMA_SERVER names no llama-server")


@dataclass
class Real:
    """A server that can be killed and started again at its address."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    flags: tuple[str, ...] = ("-np", "2", "--cache-ram", "0", "--no-cache-idle-slots")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [PROGRAM, "-m", os.environ["LLAMA_GGUF"], "-c", "16384", *self.flags]
        command += ["--slot-save-path", f"{self.folder}/", "--port", str(self.port)]
        with open(self.folder.parent / "server.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_up, seconds=300)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _is_up(self) -> bool:
        assert self.process is not None and self.process.poll() is None, "the server ended"
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            time.sleep(0.2)
            return False


@contextmanager
def real_server(root: Path, *more: str) -> Iterator[Real]:
    folder = root / "slots"
    folder.mkdir(mode=0o700)
    real = Real(folder, free_port())
    real.flags = (*real.flags, *more)
    real.start()
    try:
        yield real
    finally:
        real.kill()


@contextmanager
def engine_of(real: Real) -> Iterator[Engine]:
    settings = {
        "UPSTREAM": real.url,
        "UPSTREAM_SLOTS": str(real.folder),
        "MODEL": os.environ["LLAMA_MODEL"],
        "MIN_CACHE_TOKENS": 32,
    }
    with running_engine("upstream", settings) as engine:
        yield engine


def flood(engine: Engine) -> None:
    for _ in range(4):
        engine.ask(prompt(engine.text(60)), engine.scope())


def write(engine: Engine, scope: str, shared: str) -> int:
    usage = engine.ask(prompt(shared, "one"), scope, (0, "1h")).usage
    assert usage.cache_write_1h_tokens == engine.ends(prompt(shared, "one"))[0]
    return usage.cache_write_1h_tokens


def read(engine: Engine, scope: str, shared: str, tail: str = "two") -> int:
    return engine.ask(prompt(shared, tail), scope, (0, "1h")).usage.cache_read_tokens


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with real_server(tmp_path_factory.mktemp("llama")) as server:
        yield server


def test_marks_survive_a_flood_and_kills_of_either(real: Real) -> None:
    with engine_of(real) as engine:
        assert engine.keeps("hold"), engine.description.guarantees
        scope, shared = engine.scope(), engine.text(300)
        written = write(engine, scope, shared)
        flood(engine)
        assert read(engine, scope, shared) == written
        assert read(engine, engine.scope(), shared) == 0, "another workspace"
        before = epoch_of(engine)
        real.kill()
        real.start()
        wait_until(lambda: epoch_of(engine) not in (None, before))
        assert read(engine, scope, shared) == written
        engine.process.kill()
        wait_until(lambda: engine.process.poll() is not None)
    with engine_of(real) as engine:
        assert read(engine, scope, shared) == written


def test_four_marks_are_computed_once_and_read_exactly(real: Real) -> None:
    with engine_of(real) as engine:
        scope = engine.scope()
        texts = [engine.text(count) for count in (120, 90, 70, 50)]
        whole = prompt(*texts, "What?")
        ends = engine.ends(whole)
        usage = engine.ask(whole, scope, *((n, "1h") for n in range(4))).usage
        assert usage.cache_write_1h_tokens == ends[3]
        assert usage.computed_tokens == engine.count(whole).input_tokens
        for count in range(4):
            flood(engine)
            asked = prompt(*texts[: count + 1], "Other?")
            usage = engine.ask(asked, scope, (count, "1h")).usage
            assert usage.cache_read_tokens == ends[count]


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_file_never_reaches_the_server(real: Real, how: str) -> None:
    with engine_of(real) as engine:
        scope, shared = engine.scope(), engine.text(200)
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
        assert real.process is not None and real.process.poll() is None


@pytest.mark.parametrize(
    ("flag", "named"),
    [("--kv-unified", "--kv-unified"), ("--no-slots", "--no-slots")],
)
def test_a_flag_that_takes_leases_away_is_named(tmp_path: Path, flag: str, named: str) -> None:
    with real_server(tmp_path, flag) as server, engine_of(server) as engine:
        told = {promise.name: promise for promise in engine.description.guarantees}
        assert not told["hold"].is_kept and named in told["hold"].note
