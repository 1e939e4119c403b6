"""The deadline of a start, kept by a process of its own.

What loads runs patterns and templates of an operator's files: a chat template, a tokenizer's
`pre_tokenizer`. Such a pattern may take longer than anybody waits (CWE-1333) and holds the
interpreter's lock meanwhile, so nothing of the same process can end it.
"""

import json
import os
import select
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self


class StartDeadline:
    """Ends this process with SIGKILL where a stage of its start takes longer than `seconds`, and
    says so in one line of the log. Within the block `note` tells each stage, and each step of it.
    """

    def __init__(self, seconds: float) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            # Nothing of ours or of the environment is imported: it starts in 20 ms.
            [sys.executable, "-I", "-S", __file__, f"{seconds:g}"],
            stdin=subprocess.PIPE,
        )

    def note(self, stage: str) -> None:
        """The start has come so far. Called from any thread."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(stage.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            # It was ended by others: the start goes on without a deadline.
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _main(seconds: float) -> None:
    """The process: end the parent where it says nothing for so long. Its end is ours."""
    parent = os.getppid()
    stage = "starting"
    while select.select([0], [], [], seconds)[0]:
        written = os.read(0, 65_536)
        if not written:
            return
        stage = written.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    why = f"{stage}: takes more than {seconds:g} seconds (ENGINE_LOAD_SECONDS)"
    line = json.dumps({"event": "engine failed", "level": "error", "error": why})
    os.write(1, line.encode() + b"\n")
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
