"""Our part in vLLM's scheduler can fail, and vLLM goes on without it.

vLLM's scheduler calls our hooks in its own loop: an error that left a hook would end the engine for
all its users. The first error switches us off for good. All leases end then, no hook does anything
any more, and every call of the server is answered with the reason.
"""

from collections.abc import Callable
from typing import TypeVar

from vllm.logger import init_logger

from engine.supervisor import trace_of

T = TypeVar("T")
logger = init_logger(f"vllm.{__name__}")


class SwitchedOff(RuntimeError):
    """The message says why."""


class Switch:
    """On until the first error. `give_back` ends every lease and protection; it may fail too."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.give_back: Callable[[], None] = lambda: None

    @property
    def is_on(self) -> bool:
        return self.reason is None

    def run(self, function: Callable[[], T], otherwise: T) -> T:
        """The function's result, or `otherwise` where it fails or we are off."""
        if self.reason is not None:
            return otherwise
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - the edge: vLLM must not end by our error
            self.turn_off(type(error).__name__)
            logger.error("Holdfast failed and is off. vLLM goes on.\n%s", trace_of(error))
            return otherwise

    def turn_off(self, reason: str) -> None:
        """End all holds. Whatever is asked of us from now on is refused with the reason."""
        if self.reason is not None:
            return
        self.reason = reason
        try:
            self.give_back()
        except Exception as error:  # noqa: BLE001 - as above
            logger.error("Holdfast could not give back all blocks.\n%s", trace_of(error))

    def check(self) -> None:
        """Raise SwitchedOff unless we are on."""
        if self.reason is not None:
            raise SwitchedOff(f"the connector is off: {self.reason}")
