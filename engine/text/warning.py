"""Warnings about a model's files, from what runs in the engine and in its workers."""


def warn(event: str, **facts: object) -> None:
    """One line of the log."""
    # With asyncio and rich it would be a third of what a worker imports. Few ever warn.
    import structlog

    structlog.get_logger().warning(event, **facts)
