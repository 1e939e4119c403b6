"""Servers as processes on free loopback ports: what tests, benchmarks and simulations start.

The standard library is enough to import this module, because `scripts/run` uses it before anything
is installed.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from scripts.setup import reserved_ports

if TYPE_CHECKING:
    import httpx

ROOT = Path(__file__).resolve().parents[1]
ALIASES = ROOT / "scripts" / "aliases.toml"
"""The id that benchmarks and tests ask for. It means the model that is served first."""
HOST = reserved_ports.HOST
ENGINE_SECRET = "engine-secret-for-tests"
API_KEY = "hf-key-for-tests-0000000000000000"
ADMIN_KEY = "hf-admin-for-tests-00000000000000"
MASTER_SECRET = "master-secret-for-tests-0000000000"
API_HEADERS = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}

POLL_SECONDS = 0.1
PROBE_SECONDS = 5.0
STOP_SECONDS = 20.0
# A process has stalled if for so long it neither says something new nor computes.
STALL_SECONDS = 180.0
STALLED_CPU_SECONDS = 0.5
TAIL_LINES = 15

Process = Popen[bytes]


class StartError(RuntimeError):
    """A server ended or stalled before it was ready. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """The answer of a readiness probe. An empty stage means that nothing answers yet."""

    ready: bool
    stage: str = ""
    progress: float | None = None

    def __str__(self) -> str:
        return self.stage if self.progress is None else f"{self.stage} {self.progress:.0%}"


@dataclass(frozen=True, slots=True)
class Server:
    """A started process, and where it listens."""

    url: str
    process: Process
    log: Path | None = None
    # The path of the server's readiness probe.
    ready: str = "/readyz"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait(self) -> "Server":
        """Wait until the server is ready. Raises StartError if it ends or stalls first."""
        wait_until_ready(self.url, self.process, self.ready, self.log)
        return self


def free_port() -> int:
    """A port that no other process of this machine gets while this one runs."""
    return reserved_ports.of_this_process().take()


def url_of(port: int) -> str:
    return f"http://{HOST}:{port}"


def python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program to its end. Raises CalledProcessError if it fails."""
    subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, check=True)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None = None,
    *,
    base: Mapping[str, str] = os.environ,
    quiet: bool = False,
    append: bool = False,
    before_exec: Callable[[], None] | None = None,
) -> Process:
    """Start a program in the tree's root. Its output goes to `log`, to nobody, or where ours goes.

    With `before_exec` it leads a process group of its own.
    """
    with ExitStack() as files:
        output = files.enter_context(log.open("ab" if append else "wb")) if log else None
        return Popen(
            command,
            env={**base, **environment},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output or (subprocess.DEVNULL if quiet else None),
            stderr=subprocess.STDOUT if output else subprocess.DEVNULL if quiet else None,
            start_new_session=before_exec is not None,
            preexec_fn=before_exec,
        )


def stop(*processes: Process) -> None:
    """Ask all of them to end, wait, then insist."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def probe(url: str) -> Readiness:
    """Ask once. A 503 may say in JSON how far the server is: `stage` and `progress`."""
    # Proxies of the environment are for other hosts.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_SECONDS):
            return Readiness(True)
    except urllib.error.HTTPError as refusal:
        try:
            return _progress_of(refusal.read())
        except OSError:  # a busy server has sent its head, and not yet its body
            return Readiness(False)
    except OSError:
        return Readiness(False)


def _progress_of(body: bytes) -> Readiness:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return Readiness(False, "starting")
    progress = answer.get("progress")
    is_number = isinstance(progress, int | float)
    return Readiness(False, str(answer.get("stage", "starting")), progress if is_number else None)


def wait_until_ready(
    url: str,
    process: Process,
    ready: str = "/readyz",
    log: Path | None = None,
    *,
    others: Sequence[Process] = (),
    say: Callable[[str], None] | None = None,
) -> None:
    """Wait for a server as long as it gets on; `say` is told its stages. See `wait_for`."""
    last_stage = ""

    def ask() -> Readiness:
        nonlocal last_stage
        state = probe(url + ready)
        if say is not None and not state.ready and str(state) not in ("", last_stage):
            last_stage = str(state)
            say(last_stage)
        return state

    wait_for(ask, process, log, others=others)


def wait_for(
    ask: Callable[[], Readiness],
    process: Process | None = None,
    log: Path | None = None,
    *,
    others: Sequence[Process] = (),
    seconds: float = STALL_SECONDS,
    name: str = "",
) -> None:
    """Ask again and again until the answer is "ready".

    Raises StartError where the process or one of `others` ended, and where nothing moved for so
    many seconds: no new answer came and the process computed nothing. A slow machine is no reason.
    The error calls what is waited for `name`, or by the process's command line.
    """
    processes = [watched for watched in (process, *others) if watched is not None]
    last = (Readiness(False), 0.0)
    moved_at = time.monotonic()
    while True:
        state = ask()
        if state.ready:
            return
        for watched in processes:
            if watched.poll() is not None:
                raise StartError(
                    f"{watched.args!r} ended with status {watched.returncode}{tail(log)}"
                )
        cpu = cpu_seconds(process.pid) if process else 0.0
        now = time.monotonic()
        if state != last[0] or cpu - last[1] > STALLED_CPU_SECONDS:
            last = (state, cpu)
            moved_at = now
        if now - moved_at > seconds:
            whose = name or repr(process.args if process else None)
            raise StartError(f"{whose} has stalled for {seconds:.0f} s ({state}){tail(log)}")
        time.sleep(POLL_SECONDS)


def tail(log: Path | None) -> str:
    """The end of a log, as lines under a heading. It is empty without a log."""
    if log is None or not log.exists():
        return ""
    lines = log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"; the end of {log}:", *(f"    {line}" for line in lines)])


def family(pid: int) -> list[int]:
    """A process and all that it started and has not reaped yet."""
    pids = [pid]
    for parent in pids:
        with suppress(OSError):  # it has just ended
            for thread in list(Path(f"/proc/{parent}/task").iterdir()):
                with suppress(OSError):
                    pids += map(int, (thread / "children").read_text().split())
    return pids


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its family so far; 0 if there is no /proc."""
    ticks = 0
    for member in family(pid):
        try:
            after_name = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, after_name[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(
    command: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    *,
    ready: str = "/readyz",
    log: Path | None = None,
    base: Mapping[str, str] = os.environ,
    quiet: bool = False,
) -> Iterator[Server]:
    """Start a server and end it whatever happens; `Server.wait` is left to the caller."""
    process = start(command, environment, log, base=base, quiet=quiet)
    try:
        yield Server(url_of(port), process, log, ready)
    finally:
        stop(process)


def engine_environment(port: int, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings of an engine on loopback. It computes in one thread: more than cores are slower."""
    return {
        "ENGINE_SECRET": ENGINE_SECRET,
        "ENGINE_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **(settings or {}),
    }


def gateway_environment(
    port: int, data: Path, engines: Sequence[str], settings: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Settings of a gateway on loopback, its journal and (by default) its ledger under `data`.

    Every engine answers there to the demo model's id: see ALIASES.
    """
    named = (f"engine-{number}={url}" for number, url in enumerate(engines))
    return {
        "HOLDFAST_PORT": str(port),
        "HOLDFAST_DATA": str(data),
        "HOLDFAST_ENGINES": ",".join(named),
        "HOLDFAST_API_KEY": API_KEY,
        "HOLDFAST_ADMIN_KEY": ADMIN_KEY,
        "HOLDFAST_ENGINE_SECRET": ENGINE_SECRET,
        "HOLDFAST_MASTER_SECRET": MASTER_SECRET,
        "HOLDFAST_MODELS": str(ALIASES),
        **(settings or {}),
    }


def migrate(environment: Mapping[str, str]) -> None:
    """Bring a gateway's database up to date, in this process: another Python takes a second.

    Not for callers inside an event loop, since a migration runs one of its own.
    """
    # Not installed yet where `scripts/run` imports this module.
    from gateway.base.settings import load_database
    from gateway.cli.migrate import migrate as to_newest

    to_newest(load_database(environment))


@contextmanager
def serving_engine(
    backend: str,
    settings: Mapping[str, str] | None = None,
    log: Path | None = None,
    *,
    module: str = "engine",
) -> Iterator[Server]:
    port = free_port()
    command = [*python(module), "--backend", backend]
    with serving(command, engine_environment(port, settings), port, log=log) as server:
        yield server


@contextmanager
def serving_gateway(
    data: Path,
    engines: Sequence[str],
    settings: Mapping[str, str] | None = None,
    log: Path | None = None,
    *,
    ready: str = "/readyz",
) -> Iterator[Server]:
    """Migrate a gateway's database, then start the gateway. `/readyz` needs an engine, `/healthz`
    does not."""
    port = free_port()
    environment = gateway_environment(port, data, engines, settings)
    migrate(environment)
    with serving([*python("gateway"), "serve"], environment, port, ready=ready, log=log) as server:
        yield server


@contextmanager
def serving_dashboard(
    gateway: str, settings: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[Server]:
    defaults = {"DASHBOARD_GATEWAY_URL": gateway, "DASHBOARD_PORT": str(free_port())}
    environment = defaults | dict(settings or {})
    port = int(environment["DASHBOARD_PORT"])
    with serving(
        python("dashboard"), environment, port, ready="/_stcore/health", log=log, quiet=log is None
    ) as server:
        yield server


@dataclass(frozen=True)
class Stack:
    """The URLs of a gateway and its engine, and their processes."""

    gateway: str
    engine: str
    engine_process: Process
    gateway_process: Process

    def engine_client(self) -> "httpx.Client":
        import httpx  # not installed yet where `scripts/run` imports this module

        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        return httpx.Client(base_url=self.engine, headers=headers, timeout=30)


@contextmanager
def running_stack(
    data: Path,
    backend: str = "native",
    engine_settings: Mapping[str, str] | None = None,
    gateway_settings: Mapping[str, str] | None = None,
    logs: Path | None = None,
) -> Iterator[Stack]:
    """Start an engine and a gateway, wait until both serve, and end them whatever happens.

    With `logs`, a folder, what they write goes to `engine.log` and `gateway.log` there.
    """
    with (
        serving_engine(backend, engine_settings, logs and logs / "engine.log") as engine,
        serving_gateway(
            data, [engine.url], gateway_settings, logs and logs / "gateway.log"
        ) as gateway,
    ):
        engine.wait()
        gateway.wait()
        yield Stack(gateway.url, engine.url, engine.process, gateway.process)


def signal_group(process: Process, number: signal.Signals) -> None:
    """Signal the whole group: a program may have started helpers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
