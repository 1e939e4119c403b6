"""scripts/run: whatever keeps it from starting is one line, with what to do."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.settings import DEMO_MODEL
from scripts.runner.options import ENGINES_ABOVE
from tests.scripts.runs import ROOT, ended, environment, free_base, only_line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def refused(tmp_path: Path, *arguments: str | Path, **changes: str) -> str:
    data = () if "--data" in arguments else ("--data", tmp_path / "data")
    port = () if "--port" in arguments else ("--port", str(free_base()))
    return only_line(ended(*arguments, *data, *port, **changes))


def test_a_port_in_use_names_it_and_a_command_with_free_ones(tmp_path: Path) -> None:
    base = free_base()
    with socket.socket() as other:
        other.bind(("127.0.0.1", base + ENGINES_ABOVE))
        other.listen()
        said = refused(tmp_path, "--port", str(base))
    assert f"{base + ENGINES_ABOVE} (for the engine)" in said and "scripts/run --port " in said


def test_a_file_as_data_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"{file} is a file; name a directory" in refused(tmp_path, "--data", file)
    assert f"{file} is a file; name a directory" in refused(tmp_path, "--data", file / "below")


def test_data_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    said = refused(tmp_path, "--data", "/proc/no-directory-of-ours")
    assert "can't be written to" in said and "name another directory" in said


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace")
    command = f"{mount}; exec {sys.executable} -m scripts.runner --data {tmp_path}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        cwd=ROOT,
        env=environment({}),
        capture_output=True,
        text=True,
    )
    said = only_line(done)
    assert "is full: 1 MiB are free and 64 needed" in said and "another --data" in said


def test_damaged_secrets_are_told(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "secrets.json").write_text("{")
    assert "secrets.json is damaged; delete it" in refused(tmp_path)


def test_a_model_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert f"{missing}`: there is no such directory" in refused(tmp_path, "--model", missing)


def test_a_model_without_its_files_is_told(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.gguf")
    assert "has no weights (*.safetensors)" in refused(tmp_path, "--model", model)
    (model / "config.json").unlink()
    assert "has no config.json" in refused(tmp_path, "--model", model)


def test_what_is_no_name_of_a_model_is_told(tmp_path: Path) -> None:
    assert "neither a directory here nor a hub id" in refused(tmp_path, "--model", "a b")


def test_what_the_engine_refuses_is_told_in_its_words(tmp_path: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    said = refused(tmp_path, "--model", model, "--no-dashboard")
    assert "the engine ended with status 1: `model`: " in said and "no tokenizer.json" in said
    assert "engine.log" in said


def test_a_wrong_setting_of_the_engine_is_told(tmp_path: Path) -> None:
    options = ("--engine", "synthetic", "--no-dashboard")
    said = refused(tmp_path, *options, "--engine-arg", "num_blocks=3")
    assert "ENGINE_NUM_BLOCKS: Input should be greater than or equal to 8" in said
    assert "`--engine-arg no_such` is no engine setting" in refused(
        tmp_path, *options, "--engine-arg", "no_such=3"
    )
