"""Writes log lines. If a line can't be written, nothing ends for it."""

import json
import os
import threading
from typing import Any


class LineLogger:
    """A logger for structlog that writes lines to a file descriptor, each at once.

    On a full disk, or in a pipe whose reader has gone, a line is lost and no error is raised. Lost
    lines are counted. The next line that is written stands behind their number.
    """

    def __init__(self, descriptor: int) -> None:
        self.num_failed = 0
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def msg(self, message: str) -> None:
        line = f"{message}\n"
        with self._lock:
            if self.num_failed:
                notice = {"event": "log_lines_failed", "level": "error", "lines": self.num_failed}
                # A line that failed may stand there in part.
                line = f"\n{json.dumps(notice)}\n{line}"
            try:
                self._write(line.encode(errors="backslashreplace"))
            except OSError:
                self.num_failed += 1
            else:
                self.num_failed = 0

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


class LineLoggers:
    """Makes every logger of a process the same one: its lines share the file and the count."""

    def __init__(self, descriptor: int) -> None:
        self._logger = LineLogger(descriptor)

    def __call__(self, *_: Any) -> LineLogger:
        return self._logger
