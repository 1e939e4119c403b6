"""Leases outlive the server, the engine, and both."""

from pathlib import Path

import pytest

from tests.conformance.engines import Engine, prompt
from tests.engine.backends.upstream.conftest import engine_before, wait_until
from tests.engine.backends.upstream.scripted import serving_script
from tests.engine.backends.upstream.slots.scripted_slots import (
    FileScript,
    ScriptedSlots,
    write_model,
)
from tests.engine.backends.upstream.test_restarts import epoch_of


@pytest.fixture
def script(tmp_path: Path) -> FileScript:
    write_model(tmp_path / "model.gguf")
    folder = tmp_path / "slots"
    folder.mkdir()
    return FileScript(folder=folder, model_file=str(tmp_path / "model.gguf"))


def write(engine: Engine, scope: str, shared: str) -> int:
    usage = engine.ask(prompt(shared, "one"), scope, (0, "1h")).usage
    assert usage.cache_write_1h_tokens
    return usage.cache_write_1h_tokens


def read(engine: Engine, scope: str, shared: str) -> int:
    return engine.ask(prompt(shared, "two"), scope, (0, "1h")).usage.cache_read_tokens


def test_a_lease_outlives_the_server_and_the_engine(script: FileScript) -> None:
    assert script.folder is not None
    settings = {"UPSTREAM_SLOTS": str(script.folder), "CLOCK": "monotonic"}
    with serving_script(script, ScriptedSlots) as url:
        with engine_before(url, **settings) as engine:
            scope, shared = engine.scope(), engine.text(120)
            written = write(engine, scope, shared)
            before = epoch_of(engine)
            script.start()
            wait_until(lambda: epoch_of(engine) not in (None, before))
            (entry,) = engine.entries(scope)
            assert (entry.state, entry.tier, entry.is_stored) == ("leased", "disk", True)
            assert read(engine, scope, shared) == written
            engine.process.kill()
            wait_until(lambda: engine.process.poll() is not None)
        # What was being saved when it was killed, and somebody else's file.
        (script.folder / f"hf-{'0' * 32}.part").write_bytes(b"half")
        (script.folder / "mine.bin").write_bytes(b"another's")
        script.start()
        with engine_before(url, **settings) as engine:
            (entry,) = engine.entries(scope)
            assert entry.state == "leased" and 0 < (entry.expires_in_seconds or 0) < 3600
            assert read(engine, scope, shared) == written
            wait_until(lambda: not list(script.folder.glob("*.part")))
            assert (script.folder / "mine.bin").exists()
        script.weights = 2
        script.start()
        with engine_before(url, **settings) as engine:
            assert engine.entries(scope) == [], "another model's files are nobody's"
            assert read(engine, scope, shared) == 0


def test_without_the_setting_and_with_a_wrong_server_nothing_is_leased(script: FileScript) -> None:
    assert script.folder is not None
    script.is_unified = True
    with serving_script(script, ScriptedSlots) as url:
        for more in ({}, {"UPSTREAM_SLOTS": str(script.folder)}):
            with engine_before(url, **more) as engine:
                told = {promise.name: promise for promise in engine.description.guarantees}
                assert not told["hold"].is_kept
                assert ("--kv-unified" in told["hold"].note) == bool(more)
                answer = engine.ask(prompt(engine.text(60)), engine.scope(), 0)
                assert answer.started.breakpoints[0].reason == "no_hold"
                assert not list(script.folder.glob("hf-*"))
