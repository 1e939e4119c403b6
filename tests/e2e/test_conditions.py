"""Real engines that are killed, stand still, drain or can't write their store.

Each is one condition in `/readyz`, the admin API, `/metrics` and on the command line, and is gone
when it is over.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.stack import (
    ADMIN_KEY,
    ROOT,
    engine_environment,
    free_port,
    python,
    serving,
    serving_gateway,
)
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

EXIT_SECONDS = 180.0
SYSTEM = "The handbook of the lighthouse keeper. " * 300


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[Fleet]:
    """The second engine has a store."""
    per_engine = ({}, {"ENGINE_STORE": str(store)})
    with running_fleet(tmp_path_factory.mktemp("pair"), 2, per_engine=per_engine) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: Fleet) -> Fleet:
    shared.restored()
    eventually(lambda: conditions(shared) == [])
    return shared


def conditions(fleet: Fleet, key: str | None = None) -> list[Any]:
    admin = fleet.gateway if key is None else Admin(fleet.gateway.url, key)
    listing: list[Any] = admin.get("conditions")
    return listing


def in_readyz(fleet: Fleet) -> list[Any]:
    reply = httpx.get(f"{fleet.gateway.url}/readyz", timeout=120, trust_env=False)
    listing: list[Any] = reply.json()["conditions"]
    return listing


def in_metrics(fleet: Fleet, kind: str, severity: str) -> float:
    text = httpx.get(f"{fleet.gateway.url}/metrics", timeout=120, trust_env=False).text
    series = f'holdfast_gateway_conditions{{kind="{kind}",severity="{severity}"}} '
    (line,) = [line for line in text.splitlines() if line.startswith(series)]
    return float(line.removeprefix(series))


def on_command_line(fleet: Fleet, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*python("gateway"), "conditions", "--url", fleet.gateway.url, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def the_one(fleet: Fleet, kind: str) -> Any:
    """The only condition, once it is there, which every place tells alike."""
    eventually(lambda: [condition["kind"] for condition in conditions(fleet)] == [kind])
    (condition,) = conditions(fleet)
    assert in_readyz(fleet) == [condition]
    assert in_metrics(fleet, kind, condition["severity"]) == 1
    output = on_command_line(fleet, "--json")
    assert json.loads(output.stdout) == [condition]
    assert output.returncode == (0 if condition["severity"] == "info" else 1)
    assert condition["remedy"] in on_command_line(fleet).stdout
    return condition


def test_nothing_is_wrong_with_a_fleet_that_is_well(fleet: Fleet) -> None:
    assert in_readyz(fleet) == []
    output = on_command_line(fleet)
    assert (output.returncode, output.stdout) == (0, "nothing is wrong\n")
    assert in_metrics(fleet, "engine_not_answering", "critical") == 0


def test_an_engine_that_is_killed_has_not_answered_since_it_was_heard_last(fleet: Fleet) -> None:
    before = fleet.gateway.get("about")["now_ms"]
    fleet.kill(0)
    condition = the_one(fleet, "engine_not_answering")
    assert (condition["engine"], condition["severity"]) == ("engine-0", "critical")
    assert condition["cause"] == "cannot connect"
    assert abs(condition["since_ms"] - before) < 30_000
    again = conditions(fleet)
    assert again == [condition], "its beginning stays"
    fleet.restart(0)
    eventually(lambda: conditions(fleet) == [])


def test_an_engine_that_stands_still_is_told_with_another_cause(fleet: Fleet) -> None:
    fleet.processes[1].send_signal(signal.SIGSTOP)
    try:
        condition = the_one(fleet, "engine_not_answering")
        assert condition["engine"] == "engine-1"
        assert condition["cause"] != "cannot connect"
    finally:
        fleet.processes[1].send_signal(signal.SIGCONT)
    eventually(lambda: conditions(fleet) == [])


def test_an_engine_that_got_no_memory_is_told_so_when_it_is_gone(tmp_path: Path) -> None:
    """Its process ended at once, and all that was told was "cannot connect"."""
    port = free_port()
    environment = engine_environment(port, {"ENGINE_GRACE_SECONDS": "600"})
    command = python("tests.engine.serve.failing_engine")
    with serving(command, environment, port) as engine:
        settings = {"HOLDFAST_QUEUE_SECONDS": "0"}
        with serving_gateway(tmp_path, [engine.wait().url], settings) as gateway:
            fleet = Fleet([engine.url], {}, gateways=[Gateway(gateway.wait().url, ADMIN_KEY)])
            assert fleet.gateway.ask(SYSTEM).status_code == 529, "no other engine can take it"
            assert engine.process.wait(EXIT_SECONDS) == 1
            cause = "it ended by an error, out of memory (MemoryError); now: cannot connect"
            eventually(lambda: [condition["cause"] for condition in conditions(fleet)] == [cause])
            condition = the_one(fleet, "engine_out_of_memory")
            assert (condition["engine"], condition["severity"]) == ("engine-0", "critical")
            assert "ENGINE_NUM_BLOCKS" in condition["remedy"]


def test_a_draining_engine_is_told_and_is_no_failure(fleet: Fleet) -> None:
    fleet.gateway.use(0, "drain")
    condition = the_one(fleet, "engine_draining")
    assert (condition["engine"], condition["severity"]) == ("engine-0", "info")
    fleet.gateway.use(0, "resume")
    assert conditions(fleet) == []


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody makes or changes a file there meanwhile. Root is stopped by an attribute alone."""
    is_root = os.geteuid() == 0
    ways = ["chattr", "-R", "+i"] if is_root else ["chmod", "-R", "a-w"]
    back = ["chattr", "-R", "-i"] if is_root else ["chmod", "-R", "u+w"]
    if subprocess.run([*ways, folder], check=False, capture_output=True).returncode:
        pytest.skip("this file system knows no immutable files")
    try:
        yield
    finally:
        subprocess.run([*back, folder], check=True)


@pytest.mark.slow  # a full disk is the same condition
def test_a_store_whose_directory_became_read_only_is_told(fleet: Fleet, store: Path) -> None:
    with read_only(store):
        fleet.gateway.use(0, "drain")
        fleet.gateway.answer(SYSTEM)
        eventually(
            lambda: "store_not_written" in [condition["kind"] for condition in conditions(fleet)]
        )
        fleet.gateway.use(0, "resume")
        condition = the_one(fleet, "store_not_written")
        assert (condition["about"], condition["engine"]) == ("the store of engine-1", "engine-1")
        assert "failed" in condition["cause"]
    # No later kill ends its lease before its time, which would be told for ten minutes.
    for lease in fleet.gateway.get("leases"):
        named = f"workspace={lease['workspace']}&engine={lease['engine']}"
        fleet.gateway.delete(f"leases/{lease['entry']['entry']}?{named}")
    eventually(lambda: conditions(fleet) == [])


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_store_whose_disk_is_full_is_told_and_written_again_when_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        per_engine = ({"ENGINE_STORE": str(disk / "store")},)
        with running_fleet(tmp_path / "fleet", 1, per_engine=per_engine) as fleet:
            eventually(lambda: conditions(fleet) == [])
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(b"x" * 512)
            fleet.gateway.answer(SYSTEM)
            condition = the_one(fleet, "store_not_written")
            assert (condition["about"], condition["engine"]) == (
                "the store of engine-0",
                "engine-0",
            )
            assert condition["cause"].startswith("No space left on device: ")
            assert "df -h" in condition["remedy"]
            # It serves on, and promises what its memory holds.
            assert fleet.gateway.answer(SYSTEM)["usage"]["cache_read_input_tokens"] > 0
            filler.unlink()
            eventually(lambda: conditions(fleet) == [])


def test_a_store_that_was_read_only_at_the_start_is_off(fleet: Fleet, store: Path) -> None:
    fleet.kill(1)
    with read_only(store):
        fleet.restart(1)
        condition = the_one(fleet, "store_off")
        assert condition["engine"] == "engine-1"
        assert "can't be opened or written" in condition["cause"]
    fleet.kill(1)
    fleet.restart(1)
    eventually(lambda: conditions(fleet) == [])


def test_a_workspaces_key_sees_how_engines_fare_and_not_what_operators_do(fleet: Fleet) -> None:
    fleet.gateway.workspace("guests")
    _, key = fleet.gateway.make_key("guests")
    fleet.kill(0)
    condition = the_one(fleet, "engine_not_answering")
    assert conditions(fleet, key) == [{**condition, "remedy": ""}]


def test_the_command_line_says_that_no_gateway_answers() -> None:
    command = [*python("gateway"), "conditions", "--url", "http://127.0.0.1:9"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert output.returncode == 2
    assert "no gateway of this version answers at http://127.0.0.1:9" in output.stderr
