"""Where `gateway.py --profile` says that a request's CPU goes: samples of py-spy, by package.

Of the main thread while it holds the interpreter's lock; the share of the journal's and the
database's threads stands beside it. C code counts for the Python function that called it.
"""

import asyncio
import re
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

_RATE = 1000


async def profile(pid: int, path: Path, seconds: int, load: Callable[[], Awaitable[object]]) -> str:
    """The profile of a process under a load that is repeated. Raise RuntimeError without py-spy."""
    program = Path(sys.executable).parent / "py-spy"
    if not program.exists() and shutil.which("py-spy") is None:
        raise RuntimeError("--profile needs py-spy: install the dependency group `profile`")
    command = [str(program) if program.exists() else "py-spy", "record", "--pid", str(pid)]
    command += ["--rate", str(_RATE), "--gil", "--threads", "--format", "raw"]
    command += ["--duration", str(seconds), "--output", str(path)]
    spy = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    ended = asyncio.ensure_future(spy.wait())
    while not ended.done():
        await load()
    if ended.result() != 0:
        raise RuntimeError("py-spy could not look at the process: it needs ptrace")
    return report(path.read_text())


def report(samples: str) -> str:
    """From lines of "thread;frame;…;frame count"."""
    threads: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        is_main = "MainThread" in thread
        threads["main" if is_main else "others"] += int(count)
        if is_main and frames:
            packages[_package(frames[-1])] += int(count)
            for frame in {re.sub(r":\d+\)$", ")", frame) for frame in frames}:
                if "(gateway/" in frame:
                    functions[frame] += int(count)
    total, main = sum(threads.values()), threads["main"]
    lines = [f"main thread {main / total:.0%} of {total} samples; of it, by package:"]
    lines += [f"  {count / main:6.1%}  {name}" for name, count in packages.most_common(12)]
    lines += ["of it, within (what is called included):"]
    lines += [f"  {count / main:6.1%}  {name}" for name, count in functions.most_common(30)]
    return "\n".join(lines)


def _package(frame: str) -> str:
    found = re.search(r"\(([^():]+)(?::\d+)?\)$", frame)
    return found[1].split("/")[0] if found else frame
