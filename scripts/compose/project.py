"""One `docker compose` project, with secrets and ports of its own, for scripts/compose_check."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts import stack
from scripts.stack import ROOT, Readiness, StartError, free_port, url_of

# So that neither a deployment of this machine nor its volumes are touched.
NAME = "holdfast-check"
BUILD_SECONDS = 3600
WAIT_SECONDS = 300
ONE_SHOT = "migrate"
PORTS = ("GATEWAY", "DASHBOARD", "PROMETHEUS")


class ComposeError(StartError):
    """Something is not as it must be; the message says what."""


def docker(*arguments: str, stdin: str | None = None, seconds: float = 600) -> str:
    """Run the docker client and return what it printed. Raises ComposeError with its last words."""
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        # Both builders do; the classic one is in every engine.
        env={**os.environ, "DOCKER_BUILDKIT": os.environ.get("DOCKER_BUILDKIT", "0")},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise ComposeError(f"docker {' '.join(arguments[:8])}: exit {done.returncode}\n{tail}")
    return done.stdout


def wait_for(what: str, condition: Callable[[], bool]) -> float:
    """Wait until a condition holds; return how many seconds that took.

    Raises StartError where it does not hold after WAIT_SECONDS.
    """
    started = time.monotonic()
    stack.wait_for(lambda: Readiness(condition()), seconds=WAIT_SECONDS, what=what)
    return time.monotonic() - started


class Project:
    def __init__(self, profile: str, env_file: Path, changes: Mapping[str, str]) -> None:
        """Write the settings of `profile` into `env_file`, which must not be there yet.

        `changes` stand at its end, where they win.
        """
        self.profile = profile
        made = [str(ROOT / "scripts" / "compose_env"), profile, str(env_file)]
        subprocess.run(made, check=True, capture_output=True)
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
        return docker("compose", *flags, "--profile", self.profile, *arguments, seconds=seconds)

    def services(self) -> list[str]:
        """All that stay up, by name."""
        named = self.compose("config", "--services").split()
        return sorted(name for name in named if name != ONE_SHOT)

    def images(self) -> list[str]:
        return sorted(set(self.compose("config", "--images").split()))

    def build(self) -> None:
        self.compose("build", "--quiet", seconds=BUILD_SECONDS)

    def up(self) -> None:
        """Start what is not up, in order, and wait until everything is healthy."""
        self.compose("up", "--detach", "--no-build")
        for service in self.services():
            self.wait_until_healthy(service)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "60")

    def container(self, service: str) -> dict[str, Any]:
        """What `docker inspect` says of it. Raises ComposeError where there is none."""
        found = self.compose("ps", "--all", "--quiet", service).split()
        if len(found) != 1:
            raise ComposeError(f"{service} has {len(found)} containers")
        said: dict[str, Any] = json.loads(docker("inspect", found[0]))[0]
        return said

    def is_healthy(self, service: str, restarts: int = 0) -> bool:
        """And has been restarted so many times."""
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
        pid, restarts = int(before["State"]["Pid"]), before["RestartCount"] + 1
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
        asked = ["psql", "-U", "holdfast", "-d", "holdfast", "-At", "-c", query]
        return self.compose("exec", "--no-TTY", "db", *asked).strip()


PYTHON = "python:3.11.14-slim-bookworm"
LABEL = "holdfast.stand-in"
# Image, the stand-in it begins with, and what makes it like the real one: those of PostgreSQL,
# Prometheus and nginx can be started as a user of their own, whose data is theirs.
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
    said = json.loads(docker("image", "inspect", image))[0]
    is_alias = any(tag.startswith("stand-in/") for tag in said["RepoTags"])
    return is_alias or LABEL in (said["Config"]["Labels"] or {})


def call(program: Path, *arguments: str) -> None:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise ComposeError(f"{program.name} {' '.join(arguments)}: {done.stderr[-800:]}")


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
