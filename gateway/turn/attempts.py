"""The engines that one turn, or one count, was sent to, and what the failure of an attempt means.

Pure.

An engine whose connection broke is asked once more when it has answered a poll since: the fleet may
have no other, and its new process knows nothing of the turn.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.base.errors import (
    EngineFailed,
    EngineLost,
    EngineTimeout,
    GatewayError,
    NotServed,
    Overloaded,
)
from gateway.routing.client import CannotConnect

MAX_ATTEMPTS = 3
"""The most times that one turn is sent."""
MAX_LOST = 2
"""The most processes that may end while they have one turn: it may be the turn that ends them."""
_MAX_AT_ONE = 2


class Returning(Protocol):
    """The parts of an engine that tell whether it is back."""

    url: str
    is_draining: bool
    answered_at: float


@dataclass(slots=True)
class Attempts:
    """`sent` counts, by the engine's URL, the attempts that it took or may have taken.

    `lost` has the moment at which its connection broke last. `first_lost` is the first of all such
    moments. `num_lost` counts the connections that broke over the turn.
    """

    sent: dict[str, int] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    first_lost: float = math.inf
    num_lost: int = 0

    @property
    def is_first(self) -> bool:
        return not self.sent

    @property
    def is_last(self) -> bool:
        """Whether there was the last attempt."""
        return self.num_lost >= MAX_LOST or sum(self.sent.values()) >= MAX_ATTEMPTS

    def begin(self, url: str) -> None:
        self.sent[url] = self.sent.get(url, 0) + 1

    def take_back(self, url: str) -> None:
        """The engine did not take the turn. It may be asked again."""
        self.sent[url] -= 1
        if not self.sent[url]:
            del self.sent[url]

    def failed(self, url: str, error: GatewayError, now: float) -> None:
        """Note why the last attempt ended. A refused connection is none."""
        if isinstance(error, EngineLost):
            self.lost[url] = now
            self.first_lost = min(self.first_lost, now)
        if isinstance(error, CannotConnect):
            self.take_back(url)
        elif isinstance(error, EngineLost):
            self.num_lost += 1

    def tried(self, ready: Iterable[Returning]) -> list[str]:
        """URLs of engines that are not asked again, or not yet. `ready` are those that answer."""
        back = {e.url for e in ready if self._is_awaited(e) and e.answered_at > self.lost[e.url]}
        return [url for url in self.sent if url not in back]

    def may_return(self, engines: Iterable[Returning], now: float, seconds: float) -> bool:
        """Whether a lost engine may be waited for, for `seconds` after the first loss."""
        is_early = now < self.first_lost + seconds
        return is_early and not self.is_last and any(map(self._is_awaited, engines))

    def _is_awaited(self, engine: Returning) -> bool:
        is_lost = engine.url in self.lost and not engine.is_draining
        return is_lost and self.sent.get(engine.url, 0) < _MAX_AT_ONE


def is_unsure(error: GatewayError) -> bool:
    """Whether the engine may have taken the turn although no answer came."""
    return isinstance(error, EngineLost | EngineTimeout)


def is_breakdown(error: GatewayError) -> bool:
    """Whether the error counts against the engine: it was lost, was silent, or failed."""
    return is_unsure(error) or isinstance(error, EngineFailed)


def is_retried(error: GatewayError) -> bool:
    """Whether another engine may succeed. An error of the prompt itself would come from it too."""
    return is_breakdown(error) or isinstance(error, Overloaded)


def told(error: GatewayError) -> GatewayError:
    """The error for a client that has had nothing of the answer."""
    return NotServed() if isinstance(error, EngineLost) else error


def reason_of(error: GatewayError) -> str:
    kinds = {EngineTimeout: "timeout", EngineLost: "lost", EngineFailed: "failed"}
    return next((name for kind, name in kinds.items() if isinstance(error, kind)), "refused")
