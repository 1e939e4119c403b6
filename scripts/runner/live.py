"""One line of a terminal that is written anew while something goes on."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PERIOD_SECONDS = 0.1


class Live:
    """Shows nothing where the output is no terminal: a file gets only the lines that stay."""

    def __init__(self) -> None:
        self._is_shown = sys.stdout.isatty()
        self._width = 0

    def show(self, text: str) -> None:
        """Replace the line."""
        if not self._is_shown:
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        sys.stdout.write("\r" + text.ljust(self._width))
        sys.stdout.flush()
        self._width = len(text)

    def say(self, text: str) -> None:
        """Put a line that stays in its place."""
        if self._width:
            sys.stdout.write("\r" + " " * self._width + "\r")
            self._width = 0
        print(text, flush=True)

    @contextmanager
    def during(self, text: Callable[[float], str]) -> Iterator[None]:
        """Show `text`, which gets the seconds so far, until the block is left."""
        began, ended = time.monotonic(), threading.Event()

        def tick() -> None:
            while not ended.wait(PERIOD_SECONDS):
                self.show(text(time.monotonic() - began))

        ticking = threading.Thread(target=tick, daemon=True)
        ticking.start()
        try:
            yield
        finally:
            ended.set()
            ticking.join()
            if self._width:
                sys.stdout.write("\r" + " " * self._width + "\r")
                sys.stdout.flush()
                self._width = 0


def bar(share: float, width: int = 24) -> str:
    done = round(width * min(max(share, 0.0), 1.0))
    return "[" + "#" * done + "-" * (width - done) + "]"
