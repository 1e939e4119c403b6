"""The sample month's applications go on asking, so that its engines hold something to look at.

    python -m scripts.sample.live

The engines are synthetic ones: their pools, leases and queues are real, and they compute nothing.
Requests go to the engines themselves and to no gateway, so no turn comes about, and the ledger has
the made-up month alone. Names of prefixes are the month's, so pages tell what the ledger knows of
them. Applications ask at every hour alike. The settings are the gateway's: HOLDFAST_ENGINES,
HOLDFAST_ENGINE_SECRET and HOLDFAST_MASTER_SECRET.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from uuid import uuid4

import httpx
import msgspec

from engine.protocol import SCOPE_HEADER, AckRequest, GenerateRequest, Role
from gateway.admission.keyring import scope_under
from gateway.base.settings import EnginePlace, Settings, SettingsError, load
from scripts.sample.arrivals import DAYS, talk_of, version_on
from scripts.sample.cast import APPS, ENGINE_MODEL, MACHINES, App
from scripts.sample.month import scope_of
from scripts.sample.prompt import SamplePrompt

TALKS_AT_ONCE = 4
"""How many talks go on with each engine."""
MAX_PROMPT_TOKENS = 100_000
"""The longest prompt of a talk, in tokens. The talk ends before it is longer."""
_PAUSE_SECONDS = 5.0
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


def main() -> int:
    try:
        settings = load()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 1
    asyncio.run(go_on(settings))
    return 0


async def go_on(settings: Settings) -> None:
    """Keep talks going with every engine whose name the month has, until cancelled."""
    secret = settings.engine_secret.get_secret_value()
    serves = {machine.name: machine.serves for machine in MACHINES}
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    async with (
        httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for place in map(EnginePlace.parse, settings.engines):
            if place.name in serves:
                for _ in range(TALKS_AT_ONCE):
                    tasks.create_task(keep_talking(http, place, serves[place.name], settings))


async def keep_talking(
    http: httpx.AsyncClient, place: EnginePlace, model: str, settings: Settings
) -> None:
    """Keep one talk after the other with one engine. `model` is the model that it stands for."""
    chance = random.Random()
    master = settings.master_secret.get_secret_value().encode()
    apps = [app for app in APPS if ENGINE_MODEL[app.model] == model]
    while True:
        (app,) = chance.choices(apps, [app.share for app in apps])
        scope = scope_under(master, app.workspace)
        try:
            for due_ms, request in talk(app, scope, chance):
                await asyncio.sleep(max(due_ms / 1000 - time.time(), 0.0))
                await ask(http, place.url, request)
        except httpx.HTTPError as error:
            print(f"{place.name}: {error!r}", file=sys.stderr)
            await asyncio.sleep(_PAUSE_SECONDS)


def talk(app: App, scope: str, chance: random.Random) -> Iterator[tuple[int, GenerateRequest]]:
    """The requests of a new talk, and when each is due, in milliseconds since 1970. `scope` is the
    workspace's with these engines."""
    messages: list[tuple[Role, str, int]] = []
    number = chance.getrandbits(32)
    for arrival in talk_of(app, int(time.time() * 1000), number, chance):
        turn = f"{arrival.talk}.{arrival.turn}"
        messages.append(("user", f"question {turn}", chance.randint(*app.question)))
        prompt = SamplePrompt(arrival, messages, version_on(DAYS), scope_of(app.workspace))
        if prompt.tokens > MAX_PROMPT_TOKENS:
            return
        answer = chance.randint(*app.answer)
        yield arrival.ms, prompt.request(uuid4().hex, scope, answer)
        messages.append(("assistant", f"answer {turn}", answer))


async def ask(http: httpx.AsyncClient, url: str, request: GenerateRequest) -> None:
    """Run a request to its end. The engine need not keep its counts: nobody is billed for them.
    Raise HTTPError if it is refused or the engine goes away."""
    headers = {SCOPE_HEADER: request.scope}
    body = msgspec.json.encode(request)
    async with http.stream("POST", f"{url}/v1/generate", content=body, headers=headers) as reply:
        reply.raise_for_status()
        async for _ in reply.aiter_raw():
            pass
    acknowledgement = msgspec.json.encode(AckRequest([request.request_id]))
    (await http.post(f"{url}/v1/ack", content=acknowledgement)).raise_for_status()


if __name__ == "__main__":
    sys.exit(main())
