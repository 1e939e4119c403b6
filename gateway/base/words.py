"""Numbers in sentences."""


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Write a count with its noun: 1 engine, 12 engines. A noun whose plural takes more than an s
    needs `plural`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
