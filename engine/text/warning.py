"""Warnings about a model's files, from code that runs in the engine and in its workers."""


def warn(event: str, **facts: object) -> None:
    """Log one line."""
    # It is imported here because few workers warn. With asyncio and rich it would be a third of a
    # worker's imports.
    import structlog

    structlog.get_logger().warning(event, **facts)
