"""The deadline of a start, kept by a process of its own.

The load runs patterns and templates of an operator's files: a chat template, a tokenizer's
`pre_tokenizer`. Such a pattern may take longer than anybody waits (CWE-1333). It holds the
interpreter's lock meanwhile, so no code in the same process can end it.
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
    """Ends this process with SIGKILL if a stage of its start takes longer than `seconds`.

    One line of the log says so. Within the context `note` must be called for each stage, and for
    each step of it.
    """

    def __init__(self, seconds: float) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            # Nothing of ours or of the environment is imported: it starts in 20 ms.
            [sys.executable, "-I", "-S", __file__, f"{seconds:g}"],
            stdin=subprocess.PIPE,
        )

    def note(self, stage: str) -> None:
        """Note that the start has come to this stage. It may be called from any thread."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(stage.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            # Others have ended the process. The start goes on without a deadline.
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
    """Run the process: end the parent if it says nothing for `seconds`.

    The process ends when its parent ends.
    """
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
