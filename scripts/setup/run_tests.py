"""Run pytest in several processes, and end with what was left out: by name, with the reason.

Much of the tests is waiting for other processes, so there is one more of these than cores.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
ROOT = Path(__file__).resolve().parents[2]


def find_chromium() -> str | None:
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)  # as `python -m pytest` would: the packages are imported from the tree
    chromium = os.environ.get("CHROMIUM") or find_chromium()
    if chromium:
        os.environ["CHROMIUM"] = chromium
    workers = ["-n", str((os.cpu_count() or 1) + 1), "--dist", "loadfile", "--no-loadscope-reorder"]
    return int(pytest.main(["-p", "tests.left_out", *workers, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
