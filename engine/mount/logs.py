"""Our log lines in a process that is somebody else's."""

import logging

import structlog


def send_logs_to_vllm() -> None:
    """Let structlog write to vLLM's logger, one line each, without any values of variables.

    Nothing changes where the process has configured structlog itself: that is its owner's choice.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=lambda *_: logging.getLogger("vllm.holdfast"),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
