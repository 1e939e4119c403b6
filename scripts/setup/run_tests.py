"""Run pytest in several processes, with all random numbers from one seed.

A part of the tests is waiting for other processes, so there is one more of these than cores, or as
many as there are five GiB of memory for: a process and the servers that it starts take that much.
With more of them a slow machine answers no request in time. tests/conftest.py says in which order
the files go.
TEST_SEED is a number, or `fresh` for a new one; without it every run draws the same, so
that a run in a new clone fails only where something is wrong.
"""

import os
import secrets
import sys

from scripts.setup.chromium import find_chromium
from scripts.stack import ROOT, python

PROCESS_BYTES = 5 << 30


def main(arguments: list[str]) -> int:
    wanted_seed = os.environ.get("TEST_SEED", "")
    seed = str(secrets.randbelow(2**32) if wanted_seed == "fresh" else int(wanted_seed or 1))
    # Without the plugin pytest keeps the order of the files, and does not know the option.
    seed_options = [] if "no:randomly" in arguments else [f"--randomly-seed={seed}"]
    if wanted_seed:
        # Without it Hypothesis derives its examples from each test (tests/conftest.py).
        seed_options.append(f"--hypothesis-seed={seed}")
        os.environ["TEST_SEED"] = seed
    print(f"seed: {seed}; TEST_SEED=fresh draws another, TEST_SEED={seed} the same", flush=True)
    os.environ["PYTHONHASHSEED"] = seed
    # Without this each of hundreds of servers would compile the tree anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    chromium = find_chromium()
    if chromium:
        os.environ["CHROMIUM"] = chromium
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    number = max(cores, min(cores + 1, memory // PROCESS_BYTES))
    parallel = ["-n", str(number), "--no-loadscope-reorder"]
    report = ["--durations=20", "--durations-min=1"]
    os.chdir(ROOT)
    command = [*python("pytest"), *parallel, *report, *seed_options, *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
