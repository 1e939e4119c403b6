"""scripts/run: whatever keeps it from starting is one line, with what to do."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine.settings import DEMO_MODEL
from engine.variables import misspelt
from scripts.runner.data import Running, owning, prepare_data, read_running
from scripts.runner.options import ENGINES_ABOVE, Program, known_settings
from scripts.runner.supervisor import Child
from scripts.stack import StartError
from tests.scripts.runs import ROOT, ended, environment, free_base, only_line

RUNNING = Running(pid=1, gateway="http://127.0.0.1:8080", dashboard=None)
SECRET = ("--secret", "secret-of-the-vllm")
SYNTHETIC = ("--engine", "synthetic", "--no-dashboard", "--engine-arg")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "vllm"], "VLLM_PYTHON"),
        (["--port", "65500"], "between 1 and 65114"),
        (["--sample", "--no-dashboard"], "--sample"),
        (["--engine", "other"], "invalid choice"),
        (["--engines", "0"], "--engines"),
        (["--engine-arg", "blocks"], "K=V"),
        (["--engine-arg", "port=1"], "scripts/run itself"),
        (["--attach", "host:8000/holdfast", *SECRET], "must be an address such as"),
        (["--attach", "http://127.0.0.1:1/holdfast"], "--secret"),
        (["--attach", "http://127.0.0.1:1/holdfast", "--secret", "short"], "16 characters"),
        (["--attach", "http://127.0.0.1:1", *SECRET, "--engine", "native"], "leave it out"),
        (["--attach", "http://127.0.0.1:1", *SECRET, "--engines", "2"], "leave it out"),
    ],
)
def test_an_unserved_option_exits_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    process = ended(*arguments, "--data", tmp_path / "data", VLLM_PYTHON="/no/such/python")
    assert process.returncode == 2 and words in process.stderr


def test_a_name_that_is_almost_a_setting_is_told() -> None:
    names = {"HOLDFAST_ENGINS": "x", "ENGINE_SECRT": "x", "HOLDFAST_API_KEY": "x", "HOME": "/"}
    assert misspelt(names, known_settings()) == [
        "ENGINE_SECRT is no setting: did you mean ENGINE_SECRET?",
        "HOLDFAST_ENGINS is no setting: did you mean HOLDFAST_ENGINES?",
    ]


def refused(tmp_path: Path, *arguments: str | Path, **changes: str) -> str:
    data = () if "--data" in arguments else ("--data", tmp_path / "data")
    port = () if "--port" in arguments else ("--port", str(free_base()))
    return only_line(ended(*arguments, *data, *port, **changes))


def test_a_port_in_use_names_it_and_a_command_with_free_ones(tmp_path: Path) -> None:
    base = free_base()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", base + ENGINES_ABOVE))
        listener.listen()
        message = refused(tmp_path, "--port", str(base))
    assert (
        f"{base + ENGINES_ABOVE} (for the engine)" in message and "scripts/run --port " in message
    )


class Elsewhere(BaseHTTPRequestHandler):
    """A server that has no engine of ours, or one in a state of `answers`, by path."""

    answers: ClassVar[dict[str, tuple[int, dict[str, Any]]]] = {}

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, {"detail": "Not Found"}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_is_wrong_with_an_attached_engine_is_told_before_anything_starts(
    tmp_path: Path, elsewhere: str
) -> None:
    def said(url: str) -> str:
        return refused(tmp_path, "--attach", url, *SECRET)

    nobody = f"http://127.0.0.1:{free_base()}/holdfast"
    assert f"nothing answers at `--attach {nobody}`" in said(nobody)
    Elsewhere.answers = {}
    assert f"the plugin's path is {elsewhere}/holdfast" in said(elsewhere)
    assert "has no engine of Holdfast (status 404)" in said(f"{elsewhere}/holdfast")
    off = {"stage": "failed", "ready": False, "error": "vLLM 0.40.0 is not known"}
    Elsewhere.answers = {"/holdfast/readyz": (503, off)}
    assert "is off (vLLM 0.40.0 is not known)" in said(f"{elsewhere}/holdfast")
    Elsewhere.answers = {
        "/holdfast/readyz": (200, {"stage": "ready", "ready": True, "error": ""}),
        "/holdfast/v1/describe": (401, {}),
    }
    assert "`--secret` must be its ENGINE_SECRET" in said(f"{elsewhere}/holdfast")
    assert not (tmp_path / "data").exists()


def test_data_that_can_not_be_used_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    secrets = tmp_path / "data" / "secrets.json"
    file.touch()
    assert f"{file} is a file; name a directory" in refused(tmp_path, "--data", file)
    assert f"{file} is a file; name a directory" in refused(tmp_path, "--data", file / "below")
    message = refused(tmp_path, "--data", "/proc/no-directory-of-ours")
    assert "can't be written to" in message and "name another directory" in message
    secrets.parent.mkdir()
    values = {name: "x" * 32 for name in ("api_key", "admin_key", "engine_secret")}
    for content in ("{", "4", "null", json.dumps({**values, "master_secret": 4})):
        secrets.write_text(content)
        assert "secrets.json is damaged; delete it" in refused(tmp_path)
    for content in (json.dumps({**values, "master_secret": ""}), '{"api_key": {}}', "[[]]"):
        secrets.write_text(content)
        assert "secrets.json is damaged; delete it" in refused(tmp_path)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    unshare = ["unshare", "-rm", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    if subprocess.run([*unshare, mount], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace")
    command = [*unshare, f"{mount}; exec {sys.executable} -m scripts.runner --data {tmp_path}"]
    process = subprocess.run(command, cwd=ROOT, env=environment({}), capture_output=True, text=True)
    message = only_line(process)
    assert "is full: 1 MiB are free and 64 needed" in message and "another --data" in message


def test_a_model_that_is_none_is_told(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    model = tmp_path / "model"
    assert f"{missing}`: there is no such directory" in refused(tmp_path, "--model", missing)
    assert "neither a directory here nor a hub id" in refused(tmp_path, "--model", "a b")
    shutil.copytree(DEMO_MODEL, model)
    (model / "tokenizer.json").unlink()
    message = refused(tmp_path, "--model", model, "--no-dashboard")
    assert "the engine ended with status 1: `model`: " in message and "no tokenizer.json" in message
    assert "engine.log" in message
    (model / "model.safetensors").rename(model / "model.gguf")
    assert "has no weights (*.safetensors)" in refused(tmp_path, "--model", model)
    (model / "config.json").unlink()
    assert "has no config.json" in refused(tmp_path, "--model", model)


def test_a_wrong_setting_of_the_engine_is_told(tmp_path: Path) -> None:
    message = refused(tmp_path, *SYNTHETIC, "num_blocks=3")
    assert "ENGINE_NUM_BLOCKS: Input should be greater than or equal to 8" in message
    message = refused(tmp_path, *SYNTHETIC, "no_such=3")
    assert "`--engine-arg no_such` is no engine setting" in message
    message = refused(tmp_path, *SYNTHETIC, "num_block=3")
    assert "no engine setting: did you mean `num_blocks`?" in message


def test_a_data_directory_has_one_owner_at_a_time_and_nobody_else_reads_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    log = prepare_data(data) / "migrate.log"
    assert data.stat().st_mode & 0o777 == 0o700
    with owning(data, RUNNING):
        log.write_text("the first one's")
        again = pytest.raises(StartError, match=r"used by another.*127.0.0.1:8080.*--port")
        with again, owning(data, RUNNING):
            raise AssertionError
        assert log.read_text() == "the first one's"
        assert read_running(data) == RUNNING
    assert read_running(data) is None
    with owning(data, RUNNING):
        pass


def test_a_new_clone_reads_the_command_before_anything_is_installed() -> None:
    """Python without its packages: `scripts/run` installs them itself."""
    command = [sys.executable, "-S", "-c", "import scripts.runner.supervisor"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_a_program_said_long_before_is_not_why_it_was_killed(
    tmp_path: Path, is_killed: bool
) -> None:
    line = json.dumps({"event": "stats_failed", "error": "the engine did not answer in time"})
    ends = "time.sleep(600)" if is_killed else "raise SystemExit(3)"
    command = [sys.executable, "-c", f"import time; print({line!r}, flush=True); {ends}"]
    child = Child(Program(name="gateway", command=command, port=None), tmp_path)
    if is_killed:
        deadline = time.monotonic() + 60
        while not child.log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.process.kill()
    child.process.wait(60)
    if is_killed:
        assert child.epitaph() == "was killed (SIGKILL, as when memory runs out)"
    else:
        assert child.epitaph() == "ended with status 3: the engine did not answer in time"
