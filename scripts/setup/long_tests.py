"""Tests that are too long for every commit.

    scripts/long_tests                            lists what there is, and how long each takes
    scripts/long_tests WHAT [arguments]           arguments are pytest's, or those of the program

Examples are drawn anew in each run, from a seed that is printed; TEST_SEED=N draws the same again.
"""

import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from scripts.setup.install_needs import install
from scripts.stack import ROOT, python

PYTEST = (*python("pytest"), "--timeout", "0", "-rP", "-p", "no:randomly")


def jobs() -> dict[str, dict[str, Any]]:
    """The tables of long_tests.toml by name, and the whole suite with all their numbers."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    numbers = {"TEST_SEED": "fresh"}
    for job in tables.values():
        numbers |= job.get("numbers", {})
    about = "scripts/test --all with new seeds and all numbers above"
    command = ["scripts/test", "--all", "--timeout", "0"]
    whole = {"about": about, "minutes": 120, "command": command, "numbers": numbers}
    return {**tables, "whole": whole}


def main(arguments: list[str]) -> int:
    name, *extra = arguments or [""]
    job_by_name = jobs()
    if name not in job_by_name:
        print(__doc__)
        for job_name, job in job_by_name.items():
            print(f"  {job_name:14}{job['minutes']:>4} min  {job['about']}")
        return 0 if name in ("", "-h", "--help") else 2
    job = job_by_name[name]
    environment = {**job.get("numbers", {}), **os.environ}
    seed = ""
    tests = job.get("tests")
    if tests:
        number = environment.setdefault("TEST_SEED", str(random.SystemRandom().randrange(2**32)))
        command = [*PYTEST, *tests, f"--hypothesis-seed={number}"]
        seed = f"; TEST_SEED={number}"
    else:
        command = job.get("command") or python(job["module"])
    if "vllm_tests" not in command[0]:
        install(["gateway", "engine", "test"])
    print(f"==> {name}: about {job['minutes']} minutes on two cores{seed}", flush=True)
    try:
        return subprocess.run([*command, *extra], cwd=ROOT, env=environment).returncode
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
