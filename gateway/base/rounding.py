"""Whole numbers that are rounded up. Pure."""


def ceil_div(amount: int, size: int) -> int:
    """How many pieces of `size` hold `amount`."""
    return -(-amount // size)


def round_up(amount: int, step: int) -> int:
    """The first multiple of `step` that is not below `amount`."""
    return ceil_div(amount, step) * step
