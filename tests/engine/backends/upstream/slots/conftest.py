"""One engine in front of one scripted server with slot files, for the whole module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.engines import Engine
from tests.engine.backends.upstream.conftest import engine_before
from tests.engine.backends.upstream.scripted import serving_script
from tests.engine.backends.upstream.slots.scripted_slots import (
    FileScript,
    ScriptedSlots,
    write_model,
)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> FileScript:
    root = tmp_path_factory.mktemp("llama")
    write_model(root / "model.gguf")
    folder = root / "slots"
    folder.mkdir()
    return FileScript(folder=folder, model_file=str(root / "model.gguf"))


@pytest.fixture(scope="module")
def running(script: FileScript) -> Iterator[Engine]:
    with (
        serving_script(script, ScriptedSlots) as url,
        engine_before(url, UPSTREAM_SLOTS=str(script.folder), LOG_LEVEL="info") as engine,
    ):
        yield engine


@pytest.fixture
def engine(running: Engine, script: FileScript) -> Iterator[Engine]:
    yield running
    script.fault = None
    script.is_full = False
    script.restored_short = False
    assert running.process.poll() is None, "the engine died"
    running.wait_until_idle()
    assert not script.seen_busy, "a slot was touched while something ran in it"
    assert not script.aborted, "the server was given a file that it aborts at"


def files_of(folder: Path | None) -> list[Path]:
    assert folder is not None
    return sorted(folder.glob("hf-*"))
