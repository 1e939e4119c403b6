"""python -m gateway prices check | list"""

import argparse
from pathlib import Path

from gateway.base.clock import Clock
from gateway.base.settings import load_price_files
from gateway.cli.arguments import Commands, add_actions
from gateway.prices.files import HOSTED, SHIPPED, WRITES, load_prices
from gateway.prices.money import per_million
from gateway.prices.sheets import PriceSheets


def add_commands(commands: Commands) -> None:
    prices = add_actions(commands, "prices", "check and list price sheets")
    check = prices.add_parser("check", help="read price files and say what is wrong")
    check.add_argument("files", nargs="*", type=Path, help="default: those the settings name")
    check.set_defaults(run=_check_prices)
    prices.add_parser("list", help="print today's prices").set_defaults(run=_list_prices)


def _check_prices(options: argparse.Namespace) -> int:
    files = load_price_files()
    for path in options.files or [files.prices or SHIPPED, files.hosted_prices or HOSTED]:
        print(f"{path}: {len(load_prices(path).all)} prices, no problem")
    return 0


def _list_prices(_: argparse.Namespace) -> int:
    files = load_price_files()
    print("own prices, dollars per million tokens")
    _print_sheet(load_prices(files.prices or SHIPPED))
    published = load_prices(files.hosted_prices or HOSTED)
    print(f"\npublished prices, for comparison only ({published.source}, {published.as_of})")
    _print_sheet(published)
    return 0


def _print_sheet(sheets: PriceSheets) -> None:
    names = ("input", *WRITES, "read", "output")
    print(f"{'id':48}", *(f"{name:>9}" for name in names))
    for price in sheets.current(Clock().wall().date()):
        bands = [("", price.rates)]
        bands += [(f" above {band.above_prompt_tokens:,}", band.rates) for band in price.bands]
        for label, rates in bands:
            writes = (rates.write(ttl) for ttl in WRITES.values())
            shown = map(per_million, (rates.input, *writes, rates.read, rates.output))
            print(f"{price.id + label:48}", *(f"{each:>9}" for each in shown))
