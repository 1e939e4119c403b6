"""`scripts/run --sample`: a made-up month in a database of its own, made anew when it is old."""

import time
from collections.abc import Mapping
from pathlib import Path

from scripts.runner.children import die_with_parent, last_words
from scripts.runner.live import Live
from scripts.runner.plan import SAMPLE_DATABASE as DATABASE
from scripts.stack import StartError, insist, python, start

NUM_TURNS = 20_000
# The month ends when it is made; pages of the last hours are empty after that.
KEPT_SECONDS = 12 * 3600
MADE = "sample-made"


def is_made(data: Path) -> bool:
    """Whether there is a month that ended some hours ago at most."""
    made = data / MADE
    return made.exists() and time.time() - made.stat().st_mtime < KEPT_SECONDS


def drop_month(data: Path) -> None:
    """No real turn is ever in these files."""
    for file in (data / MADE, *data.glob(f"{DATABASE}*")):
        file.unlink(missing_ok=True)


def make_month(data: Path, environment: Mapping[str, str], logs: Path) -> None:
    """Raises StartError where the month can't be written."""
    print(f"==> making up {NUM_TURNS:,} turns of 30 days, half a minute or so", flush=True)
    log, live, began = logs / "sample.log", Live(), time.monotonic()
    command = [*python("gateway"), "seed", "--turns", str(NUM_TURNS)]
    process = start(command, environment, log, before_exec=die_with_parent)
    try:
        with live.during("    {:.0f} s".format):
            status = process.wait()
    finally:
        insist(process, 2)
    if status != 0:
        why = last_words(log)
        raise StartError(f"the sample month can't be made: {why} (its log: {log})")
    (data / MADE).touch()
    live.say(f"    made up in {time.monotonic() - began:.0f} s")
