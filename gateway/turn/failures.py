"""What the failure of an attempt means: for the engine, for the next attempt, for the client."""

from gateway.base.errors import (
    EngineFailed,
    EngineLost,
    EngineTimeout,
    GatewayError,
    NotServed,
    Overloaded,
)


def is_unsure(error: GatewayError) -> bool:
    """Whether the engine may have taken the turn although no answer came."""
    return isinstance(error, EngineLost | EngineTimeout)


def is_breakdown(error: GatewayError) -> bool:
    """Whether the error counts against the engine: it was lost, was silent, or failed."""
    return is_unsure(error) or isinstance(error, EngineFailed)


def is_retried(error: GatewayError) -> bool:
    """Whether another engine may succeed.

    An error of the prompt itself (4xx) would come from it too.
    """
    return is_breakdown(error) or isinstance(error, Overloaded)


def told(error: GatewayError) -> GatewayError:
    """The error for a client that has had nothing of the answer."""
    return NotServed() if isinstance(error, EngineLost) else error


def reason_of(error: GatewayError) -> str:
    match error:
        case EngineTimeout():
            return "timeout"
        case EngineLost():
            return "lost"
        case EngineFailed():
            return "failed"
        case _:
            return "refused"
