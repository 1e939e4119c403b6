"""Leases outlive the server, the engine, and both."""

from pathlib import Path
from typing import Any

import pytest

from scripts.stack import serving_engine
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
            scope = engine.scope()
            shared = engine.text(120)
            written_tokens = write(engine, scope, shared)
            before = epoch_of(engine)
            script.start()
            wait_until(lambda: epoch_of(engine) not in (None, before))
            (entry,) = engine.entries(scope)
            assert (entry.state, entry.tier, entry.is_stored) == ("leased", "disk", True)
            assert read(engine, scope, shared) == written_tokens
            engine.process.kill()
            wait_until(lambda: engine.process.poll() is not None)
        # What was being saved when it was killed, and somebody else's file.
        (script.folder / f"hf-{'0' * 32}.part").write_bytes(b"half")
        (script.folder / "mine.bin").write_bytes(b"another's")
        script.start()
        with engine_before(url, **settings) as engine:
            (entry,) = engine.entries(scope)
            assert entry.state == "leased" and 0 < (entry.expires_in_seconds or 0) < 3600
            assert read(engine, scope, shared) == written_tokens
            wait_until(lambda: not list(script.folder.glob("*.part")))
            assert (script.folder / "mine.bin").exists()
        script.weights = 2
        script.start()
        with engine_before(url, **settings) as engine:
            assert engine.entries(scope) == [], "another model's files are nobody's"
            assert read(engine, scope, shared) == 0


def test_a_second_engine_ends_before_it_touches_the_slots(
    script: FileScript, tmp_path: Path
) -> None:
    """It erased the first one's slots in its trials, and took the lock after them."""
    assert script.folder is not None
    log = tmp_path / "log"
    with serving_script(script, ScriptedSlots) as url:
        settings = {"UPSTREAM_SLOTS": str(script.folder), "CLOCK": "monotonic"}
        with engine_before(url, **settings) as engine:
            scope = engine.scope()
            shared = engine.text(120)
            written = write(engine, scope, shared)
            engine.wait_until_idle()
            num_prompts = len(script.prefills)
            num_actions = len(script.actions)
            before = {f"ENGINE_{name}": value for name, value in settings.items()}
            with serving_engine("upstream", {"ENGINE_UPSTREAM": url} | before, log) as second:
                wait_until(lambda: second.process.poll() is not None)
                assert second.process.poll() == 1
            assert (len(script.prefills), len(script.actions)) == (num_prompts, num_actions)
            assert read(engine, scope, shared) == written
    text = log.read_text("utf-8")
    assert f"{script.folder} is in use by another engine" in text
    assert "Traceback" not in text


def told_of_leases(engine: Engine) -> tuple[bool, str]:
    return next(
        (promise.is_kept, promise.note)
        for promise in engine.description.guarantees
        if promise.name == "hold"
    )


FLAGS: list[tuple[dict[str, Any], str, bool]] = [
    ({"shares_ram": True}, "--cache-ram 0", False),
    ({"is_unified": True}, "--kv-unified", True),
    ({"folder": None}, "--slot-save-path", True),
]


@pytest.mark.parametrize(("flags", "named", "is_isolated"), FLAGS, ids=[row[1] for row in FLAGS])
def test_a_wrong_flag_leaves_the_server_usable_without_leases(
    script: FileScript, flags: dict[str, Any], named: str, is_isolated: bool
) -> None:
    folder = script.folder
    assert folder is not None
    for name, value in flags.items():
        setattr(script, name, value)
    with (
        serving_script(script, ScriptedSlots) as url,
        engine_before(url, UPSTREAM_SLOTS=str(folder)) as engine,
    ):
        is_kept, note = told_of_leases(engine)
        assert not is_kept and named in note
        assert engine.keeps("isolation") == is_isolated
        store = engine.stats().store
        assert store is not None and store.refused == "server_flags"
        assert store.problem is not None and named in store.problem
        scope = engine.scope()
        shared = engine.text(80)
        first = engine.ask(prompt(shared, "one"), scope, 0)
        assert first.started.breakpoints[0].reason == "no_hold"
        assert read(engine, scope, shared) > 0
        assert not list(folder.glob("hf-*"))


def test_without_the_setting_nothing_is_leased(script: FileScript) -> None:
    with serving_script(script, ScriptedSlots) as url, engine_before(url) as engine:
        is_kept, note = told_of_leases(engine)
        assert not is_kept and "--" not in note
        assert engine.stats().store is None
        answer = engine.ask(prompt(engine.text(60)), engine.scope(), 0)
        assert answer.started.breakpoints[0].reason == "no_hold"
        assert script.folder is not None
        assert not list(script.folder.glob("hf-*"))
