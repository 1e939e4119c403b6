"""SIGINT and SIGTERM while programs run."""

import signal
from types import FrameType


class Stopped(Exception):
    """Somebody asked to stop."""


class Signals:
    """The first signal raises Stopped. Later ones only say that it is urgent."""

    def __init__(self) -> None:
        self.is_urgent = False
        self._was_asked = False

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def no_longer_raise(self) -> None:
        """Programs are being stopped: another signal only makes it urgent."""
        self._was_asked = True

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._was_asked:
            self.is_urgent = True
            return
        self._was_asked = True
        raise Stopped(signal.Signals(number).name)
