"""Base images for a machine that can pull none, made of Debian's packages and so labelled.

The program behind `--stand-ins` knows `up` (a Docker engine is running), `alias KIND IMAGE` (a
stand-in for python, postgres or prometheus gets the name of the real image) and `down`. What the
real images have and those lack is added here.
"""

import json
import subprocess
from pathlib import Path

from scripts.compose.project import ComposeError, docker

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
