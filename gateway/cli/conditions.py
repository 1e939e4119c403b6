"""python -m gateway conditions: what is wrong now at a gateway that runs"""

import argparse
import asyncio

import aiohttp
import msgspec

from gateway.base.settings import load
from gateway.cli.arguments import Commands, UsageError
from gateway.structs.conditions import Condition

_SECONDS = 10.0


class _Readiness(msgspec.Struct):
    conditions: list[Condition]


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser("conditions", help="say what is wrong now, and what to do")
    parser.add_argument("--url", help="a gateway's; default: this machine's, on HOLDFAST_PORT")
    parser.add_argument("--json", action="store_true", help="all of it")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Return 1 where something is critical or a warning."""
    url = options.url or f"http://127.0.0.1:{load().port}"
    try:
        conditions = asyncio.run(_ask(url.rstrip("/")))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise UsageError(f"no gateway of this version answers at {url}: {error!r}") from None
    if options.json:
        print(msgspec.json.encode(conditions).decode())
    else:
        for condition in conditions:
            print(f"{condition.severity}: {condition.sentence}\n    {condition.remedy}")
        if not conditions:
            print("nothing is wrong")
    return int(any(condition.severity != "info" for condition in conditions))


async def _ask(url: str) -> list[Condition]:
    """A gateway that is not ready tells them too. It needs no key."""
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        async with http.get(f"{url}/readyz") as response:
            return msgspec.json.decode(await response.read(), type=_Readiness).conditions
