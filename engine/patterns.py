"""Patterns that come with files, matched where they can be ended: in a process of their own.

Python's `re` backtracks. A pattern may take longer than anybody waits (CWE-1333), and holds the
interpreter's lock meanwhile. PEFT matches by `re`, so an engine of another syntax would compute
other ranks. The process has MATCH_SECONDS of processor time.
"""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence

MATCH_SECONDS = 2
"""Seconds of processor time, for all names and patterns of one field."""
_WALL_SECONDS = 30.0
"""The most wall time. It is longer, because others may use the processor."""
_MEMORY_BYTES = 2**29


class PatternRefused(ValueError):
    """A pattern that is no regular expression, or patterns that take too long to match."""


def matching(patterns: Sequence[str], names: Sequence[str]) -> Mapping[str, str]:
    """The first pattern that fits a module's name as PEFT finds it, for each name that one fits.

    Without names the patterns are only compiled. It waits for a process. Raises PatternRefused.
    """
    if not patterns:
        return {}
    try:
        done = subprocess.run(  # noqa: S603
            # Nothing of ours or of the environment is imported: it starts in 20 ms.
            [sys.executable, "-I", "-S", __file__],
            input=json.dumps([patterns, names]).encode(),
            capture_output=True,
            timeout=_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise PatternRefused(f"takes more than {_WALL_SECONDS:g} seconds to match") from None
    if done.returncode:
        raise PatternRefused(f"takes more than {MATCH_SECONDS} seconds or 512 MiB to match")
    answer: dict[str, dict[str, str] | str] = json.loads(done.stdout)
    names_fitted = answer["found"]
    if isinstance(names_fitted, str):
        raise PatternRefused(f"not a regular expression: {names_fitted[:64]}")
    return names_fitted


def _main() -> None:
    """Run the process: read patterns and names, and write which pattern fits each name first."""
    resource.setrlimit(resource.RLIMIT_CPU, (MATCH_SECONDS, MATCH_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    patterns, names = json.load(sys.stdin)
    compiled = list[tuple[str, re.Pattern[str]]]()
    for pattern in patterns:
        try:
            re.compile(pattern)
            compiled.append((pattern, re.compile(rf"(.*\.)?({pattern})$")))
        except (re.error, RecursionError, OverflowError):
            json.dump({"found": pattern}, sys.stdout)
            return
    fitted = dict[str, str]()
    for name in names:
        fitting = (pattern for pattern, expression in compiled if expression.match(name))
        first = next(fitting, None)
        if first is not None:
            fitted[name] = first
    json.dump({"found": fitted}, sys.stdout)


if __name__ == "__main__":
    _main()
