"""JSON lines on stderr. Nothing stops because a line can't be written.

Nothing logs prompt text, headers or keys; a last filter drops them.
"""

import asyncio
import logging
import sys
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

import structlog

from engine.lines import LineLoggers

NEVER_LOGGED = frozenset(
    {"authorization", "api_key", "x-api-key", "prompt", "text", "body", "content", "secret"}
)

_STDERR = 2

# Every call of an engine reads it. structlog's own variables would cost more: structlog looks
# through all variables of the context for them.
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def bind_request_id(request_id: str) -> None:
    """Put the id into every log line of this context from here on."""
    _request_id.set(request_id)


def bound_request_id() -> str | None:
    """The id of the request that is served here; None in the gateway's own loops."""
    return _request_id.get()


def _add_request_id(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    request_id = _request_id.get()
    if request_id is not None:
        event.setdefault("request_id", request_id)
    return event


def drop_private(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    return {key: value for key, value in event.items() if key.lower() not in NEVER_LOGGED}


_STAMP: list[structlog.typing.Processor] = [
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


def configure(level: str) -> None:
    """Set up logging. Libraries' lines are JSON too, with the name of their logger as `part`. They
    are warnings and errors, or what `level` leaves of them."""
    structlog.configure(
        processors=[_add_request_id, drop_private, *_STAMP, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=LineLoggers(_STDERR),
        cache_logger_on_first_use=False,
    )

    def name_part(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["part"] = event["_record"].name
        return event

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
            foreign_pre_chain=[_add_request_id, name_part, *_STAMP],
        )
    )
    least = max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING)
    logging.basicConfig(handlers=[handler], level=least, force=True)
    # A stream that a stop cuts off gets no line of its own: another line tells how many there were.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (record.exc_info and record.exc_info[0] is asyncio.CancelledError)
    )


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger
