"""Real engines that come back with another model: their ids stay with the first."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from engine.settings import DEMO_MODEL
from scripts.stack import engine_environment, free_port, python, serving
from tests.conformance.engines import SECRET
from tests.engine.backends.upstream.conftest import engine_before, wait_until
from tests.engine.backends.upstream.scripted import Script, serving_script
from tests.gateway.admin_client import Admin
from tests.gateway.serving import ask, eventually, serve_gateway


@contextmanager
def native(port: int, model: Path) -> Iterator[str]:
    settings = {"ENGINE_MODEL": str(model), "ENGINE_NUM_BLOCKS": "256"}
    command = [*python("engine"), "--backend", "native"]
    with serving(command, engine_environment(port, settings), port) as server:
        yield server.wait().url


def state(url: str) -> tuple[str, str]:
    (engine,) = Admin(url).get("engines")
    return engine["status"], str(engine["detail"].get("error", ""))


def copied(folder: Path) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    return folder


@pytest.mark.parametrize("changed", ["weights", pytest.param("template", marks=pytest.mark.slow)])
def test_a_native_engine_with_another_folder_of_one_name_is_refused(
    tmp_path: Path, changed: str
) -> None:
    ours, theirs = (copied(tmp_path / name / "tiny") for name in ("a", "b"))
    if changed == "weights":
        (file,) = theirs.glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.write_bytes(content)
    else:
        template = theirs / "chat_template.jinja"
        template.write_text(template.read_text("utf-8") + "{# changed #}", "utf-8")
    port = free_port()
    with serve_gateway(tmp_path / "data", f"http://127.0.0.1:{port}", models=None) as url:
        with native(port, ours):
            eventually(lambda: state(url)[0] == "ready")
            assert ask(url, model="tiny").status_code == 200
        with native(port, theirs):
            eventually(lambda: state(url)[0] == "refused")
            assert f"digest of {'weights' if changed == 'weights' else 'the chat'}" in state(url)[1]
        with native(port, ours):
            eventually(lambda: state(url)[0] == "ready")
            assert ask(url, model="tiny").status_code == 200


def test_an_engine_in_front_of_a_server_that_changed_its_model_is_refused(tmp_path: Path) -> None:
    """The engine ends by itself; the one that is started in its place has its name, not its id."""
    script = Script()
    secret = SecretStr(SECRET)
    changes = {"models": None, "engine_secret": secret, "queue_seconds": 0}
    with serving_script(script) as server:
        with engine_before(server) as engine:
            with serve_gateway(tmp_path, str(engine.client.base_url), **changes) as url:
                assert state(url)[0] == "ready"
                assert ask(url).status_code == 200
                script.model = "org/other"
                script.restart()
                wait_until(lambda: engine.process.poll() is not None)
        with engine_before(server) as engine:
            with serve_gateway(tmp_path, str(engine.client.base_url), **changes) as url:
                assert state(url)[0] == "refused"
                assert "its server's model is org/other, not org/demo" in state(url)[1]
                assert ask(url).status_code == 529
                assert Admin(url).post("engines/engine-0/give-id", {})["ids"] == ["holdfast-demo"]
                assert ask(url).status_code == 200
