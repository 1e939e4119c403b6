"""Money is integer nano-dollars: one scale, one conversion, no rounding of sums.

A price of $1 per million tokens is 1,000 nano-dollars per token, so every published price is an
integer per token and every cost is exact.
"""

from decimal import Decimal, InvalidOperation
from typing import NewType

NanoDollars = NewType("NanoDollars", int)

_NANO_PER_TOKEN = Decimal(1000)
_NANO_PER_DOLLAR = 1_000_000_000


def per_token(dollars_per_million: str) -> NanoDollars:
    """Convert a price in dollars per million tokens; raise ValueError where it is not exact."""
    try:
        nano = Decimal(dollars_per_million) * _NANO_PER_TOKEN
    except InvalidOperation:
        raise ValueError(f"price `{dollars_per_million}` is not a number") from None
    if not nano.is_finite() or nano != nano.to_integral_value() or nano < 0:
        raise ValueError(f"price `{dollars_per_million}` is not whole nano-dollars per token")
    return NanoDollars(int(nano))


def per_million(price: NanoDollars) -> str:
    """Write a price per token as dollars per million tokens, exactly."""
    return f"{(Decimal(price) / _NANO_PER_TOKEN).normalize():f}"


def dollars(amount: NanoDollars) -> str:
    """Write an amount exactly, in dollars."""
    sign = "-" if amount < 0 else ""
    whole, nano = divmod(abs(amount), _NANO_PER_DOLLAR)
    fraction = f"{nano:09d}".rstrip("0")
    return f"{sign}${whole}.{fraction or '0'}"
