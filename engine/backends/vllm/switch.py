"""Keeps errors of ours out of vLLM's scheduler.

vLLM calls our hooks, our cache policy and our tier in its own loops. An error that one of them let
out would end the engine for all its users. So the first error of a part switches that part off for
good, and the part says why it is off.
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
    """Run a method by the `switch` of its object. vLLM gets `otherwise` once that is off.

    Every method of ours that vLLM's scheduler calls is guarded as a whole. `otherwise` is also an
    attribute of the guarded method.
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
    """A part of ours is off. The message says why."""


class Switch:
    """On until the first error. Then `give_back` ends all holds of the part. It may fail too.

    `part` is the part's name in the log and in refusals.
    """

    def __init__(self, part: str = "connector") -> None:
        self.part = part
        self.reason: str | None = None
        self.give_back: Callable[[], None] = lambda: None

    @property
    def is_on(self) -> bool:
        return self.reason is None

    def run(self, function: Callable[[], T], otherwise: T) -> T:
        """The function's result. `otherwise` if the function fails or the switch is off."""
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
        """End all holds. From now on every call to the part is refused with this reason."""
        if self.reason is not None:
            return
        self.reason = reason
        try:
            self.give_back()
        except Exception as error:  # noqa: BLE001 - as above
            logger.error("Holdfast could not give back all blocks.\n%s", trace_of(error))

    def check(self) -> None:
        """Raise SwitchedOff if the switch is off."""
        if self.reason is not None:
            raise SwitchedOff(f"the {self.part} is off: {self.reason}")
