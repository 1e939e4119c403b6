"""What keeps an error of ours out of vLLM's scheduler.

vLLM calls our hooks, our cache policy and our tier in its own loops: an error that left one would
end the engine for all its users. The first error switches that part off for good, and says why.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from vllm.logger import init_logger

from engine.supervisor import trace_of

P = ParamSpec("P")
T = TypeVar("T")
logger = init_logger(f"vllm.{__name__}")


def guarded(otherwise: Any) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Run a hook of an owner's `switch`: `otherwise` is what vLLM gets from us once we are off.

    Whatever vLLM's scheduler calls of ours is guarded, whole. `hook.otherwise` tells it.
    """

    def guard(hook: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(hook)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            switch: Switch = args[0].switch  # type: ignore[attr-defined]
            answer: T = switch.run(lambda: hook(*args, **kwargs), otherwise)
            return answer

        vars(run)["otherwise"] = otherwise
        return run

    return guard


class SwitchedOff(RuntimeError):
    """The message says why."""


class Switch:
    """On until the first error. `give_back` ends what the part holds; it may fail too.

    `part` is what the log and refusals call it.
    """

    def __init__(self, part: str = "connector") -> None:
        self.part = part
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
            logger.error(
                "Holdfast's %s failed and is off. vLLM goes on.\n%s", self.part, trace_of(error)
            )
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
            raise SwitchedOff(f"the {self.part} is off: {self.reason}")
