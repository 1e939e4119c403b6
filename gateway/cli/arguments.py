"""How commands read their arguments. Each raises ArgumentTypeError for a wrong text."""

import argparse
import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar, get_args

from gateway.structs.fleet import AutoCacheMode, AutoCacheTtl

NONE = "none"
UNITS_MS = {"d": 86_400_000, "w": 7 * 86_400_000, "y": 365 * 86_400_000}
_NANO_PER_DOLLAR = 1_000_000_000
Result = TypeVar("Result")
Number = TypeVar("Number", int, float)
Commands = Any  # argparse does not name the type of what add_subparsers returns


class CommandError(Exception):
    """A command can't do its work. The process prints the message and ends with status 2."""


class UsageError(CommandError):
    """An argument or a setting is wrong."""


def add_actions(commands: Commands, name: str, about: str) -> Commands:
    """Add a command that has actions of its own, such as `keys create`."""
    return commands.add_parser(name, help=about).add_subparsers(required=True, metavar="action")


def add_auto_cache(parser: argparse.ArgumentParser) -> None:
    """Add the options of automatic caching. `none` takes the workspace's or the installation's."""
    parser.add_argument(
        "--auto-cache",
        choices=[*get_args(AutoCacheMode), NONE],
        help="what is leased of requests that mark nothing",
    )
    parser.add_argument(
        "--auto-cache-ttl", choices=[*get_args(AutoCacheTtl), NONE], help="for how long"
    )


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The columns of these options. `none` is None; a missing option is left out."""
    values = {name: getattr(options, name) for name in names}
    return {
        name: None if value == NONE else value
        for name, value in values.items()
        if value is not None
    }


def or_none(read: Callable[[str], Result]) -> Callable[[str], Result | str]:
    """A reader that also takes `none`."""
    return lambda text: NONE if text == NONE else read(text)


def number(
    read: Callable[[str], Number], least: float, most: float, what: str
) -> Callable[[str], Number]:
    """A reader of a number from `least` to `most`. `what` describes such a number in errors."""

    def checked(text: str) -> Number:
        try:
            value = read(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"`{text}` is not {what}")
        return value

    return checked


count = number(int, 1, 10**12, "a whole number of 1 or more")
days = number(int, 1, 3650, "a number of days from 1 to 3650")
share = number(float, 0, 1, "a number from 0 to 1")
seconds = number(float, 0, 31_536_000, "a number of seconds up to a year")


def nano(text: str) -> int:
    """Convert dollars to nano-dollars, exactly. Raise ArgumentTypeError for other texts."""
    try:
        value = Decimal(text.removeprefix("$")) * _NANO_PER_DOLLAR
    except InvalidOperation:
        value = Decimal(-1)
    if not value.is_finite() or value < 0 or value > 10**18 or value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"`{text}` is not an amount in dollars")
    return int(value)


def aware_moment(text: str) -> datetime:
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        value = None
    if value is None or value.tzinfo is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not a time with a zone, ISO 8601")
    return value


def age_ms(written: str) -> int:
    """Convert an age such as `90d`, `12w` or `2y` to milliseconds. Raise ArgumentTypeError for
    other texts."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dwy])", written)
    if match is None:
        raise argparse.ArgumentTypeError(f"`{written}` is not a number of days, weeks or years")
    return int(match[1]) * UNITS_MS[match[2]]


def moment_ms(written: str) -> int:
    try:
        moment = datetime.fromisoformat(written)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{written}` is not an RFC 3339 time") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def shown(value: object) -> str:
    """A value as commands print it; None is `none`."""
    if value is None:
        return NONE
    return value.isoformat() if isinstance(value, datetime) else str(value)
