"""JSON lines on stderr. Nothing logs prompt text, headers or keys; a last filter drops them."""

import asyncio
import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

NEVER_LOGGED = frozenset(
    {"authorization", "api_key", "x-api-key", "prompt", "text", "body", "content", "secret"}
)


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
    """Set up logging. Libraries' lines are JSON too, with the name of their logger as `part`.

    They are warnings and errors, or what `level` leaves of them.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            drop_private,
            *_STAMP,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
            foreign_pre_chain=[structlog.contextvars.merge_contextvars, _name_part, *_STAMP],
        )
    )
    least = max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING)
    logging.basicConfig(handlers=[handler], level=least, force=True)
    logging.getLogger("uvicorn.error").addFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    """Drop the line of each stream that a stop cuts off. Another line gives their number."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


def _name_part(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    event["part"] = event["_record"].name
    return event


def bound_request_id() -> str | None:
    """The id of the request that is served here; None in the gateway's own loops."""
    found = structlog.contextvars.get_contextvars().get("request_id")
    return found if isinstance(found, str) else None


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger
