"""Run pytest in several processes, and end with what was left out: by name, with the reason.

Much of the tests is waiting for other processes, so there are four more of these than cores, or as
many as there are two GiB of memory for.

Everything drawn by chance has a seed: the order of the tests, `random`, the examples of Hypothesis
and schemathesis, the order of sets. TEST_SEED is a number, or `fresh` for a new one. Without it
every run draws the same, so that a run in a new clone fails only where something is wrong.
"""

import os
import secrets
import sys

import pytest

from scripts.setup.chromium import find_chromium
from scripts.stack import ROOT

USUAL_SEED = 1
NUM_SLOWEST = 20
MORE_THAN_CORES = 4
PROCESS_BYTES = 2 << 30


def seeds(arguments: list[str]) -> list[str]:
    """The options of pytest that fix what is drawn. Raises ValueError where TEST_SEED is no seed.

    Hypothesis needs no number in a usual run: the profile in tests/conftest.py derives its examples
    from each test's own text.
    """
    asked = os.environ.get("TEST_SEED", "")
    seed = secrets.randbelow(2**32) if asked == "fresh" else int(asked or USUAL_SEED)
    os.environ["PYTHONHASHSEED"] = str(seed)  # the processes that run tests are started with it
    # Without the plugin pytest keeps the order of the files, and does not know the option.
    options = [] if "no:randomly" in arguments else [f"--randomly-seed={seed}"]
    if not asked:
        print(f"seed: {seed}, as in every run; TEST_SEED=fresh draws another")
        return options
    os.environ["TEST_SEED"] = str(seed)
    print(f"seed: TEST_SEED={seed} draws the same again")
    return [*options, f"--hypothesis-seed={seed}"]


def num_processes() -> int:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(cores, min(cores + MORE_THAN_CORES, memory // PROCESS_BYTES))


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)  # as `python -m pytest` would: the packages are imported from the tree
    # Else each of hundreds of servers would compile the tree anew, and each process every test.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False  # which the processes that run tests are told
    if chromium := find_chromium():
        os.environ["CHROMIUM"] = chromium
    plugins = ["-p", "tests.left_out", "-p", "tests.workers"]
    workers = ["-n", str(num_processes()), "--no-loadscope-reorder"]
    slowest = [f"--durations={NUM_SLOWEST}", "--durations-min=0.1"]
    return int(pytest.main([*plugins, *workers, *slowest, *seeds(arguments), *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
