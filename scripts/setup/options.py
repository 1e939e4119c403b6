"""Options of a command line, declared as keywords."""

import argparse
from collections.abc import Sequence
from typing import Any


def new_parser(doc: str | None, **options: object) -> argparse.ArgumentParser:
    """A parser with a flag for each keyword: a default, or a tuple of default, help and choices.

    A value is read by its default's type. False makes a switch, a list takes several values, and a
    type in the default's place leaves the option None when it is not given.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, declared in options.items():
        padded = [*_tuple(declared), None, None]
        default, about, choices = padded[:3]
        flag = "--" + name.replace("_", "-")
        many = isinstance(default, list)
        if default is False:
            parser.add_argument(flag, action="store_true", help=about)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, choices=choices, help=about)
        else:
            kind = type((default or [""])[0] if many else default)
            nargs: dict[str, Any] = {"nargs": "*"} if many else {}
            parser.add_argument(
                flag, type=kind, default=default, choices=choices, help=about, **nargs
            )
    return parser


def parse(
    doc: str | None, arguments: Sequence[str] | None = None, /, **options: object
) -> argparse.Namespace:
    """The options of `new_parser`, read from `arguments` or the command line."""
    return new_parser(doc, **options).parse_args(arguments)


def _tuple(declared: object) -> tuple[Any, ...]:
    return declared if isinstance(declared, tuple) else (declared,)
