"""Compare httpx's own transport with aiohttp's: python -m tests.gateway.bench_transport

Prints wall time, CPU time of the client and time to the first frame for 200 streams at once.
"""

import asyncio
import resource
import subprocess
import sys
import time

import httpx
import uvicorn

from engine.protocol import GenerateRequest, Message, Prompt, Sampling, Started, TextPart
from gateway.engines import Engine, make_http
from tests.gateway.scripted_engine import ScriptedEngine, say

NUM_STREAMS = 200
PORT = 9911
PROMPT = Prompt([Message("user", [TextPart("hi")])])


async def stream(engine: Engine, number: int, firsts: list[float]) -> None:
    begun = time.perf_counter()
    request = GenerateRequest(
        request_id=f"{begun}-{number}", scope="0", prompt=PROMPT, sampling=Sampling(10)
    )
    generation = await engine.generate(request)
    async for frame in generation.frames():
        if isinstance(frame, Started):
            firsts.append(time.perf_counter() - begun)


async def measure(name: str, http: httpx.AsyncClient) -> None:
    engine = Engine("engine", f"http://127.0.0.1:{PORT}", "engine-secret", http)
    while engine.status != "ready":
        await engine.poll()
        await asyncio.sleep(0.05)
    firsts: list[float] = []
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.gather(*(stream(engine, number, firsts) for number in range(NUM_STREAMS)))
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    median = sorted(firsts)[len(firsts) // 2]
    print(f"{name}: wall {wall:.2f} s, CPU {cpu:.2f} s, first frame {median:.2f} s (median)")
    await http.aclose()


async def main() -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    await measure("httpx", httpx.AsyncClient(limits=limits, trust_env=False))
    await measure("aiohttp", make_http())


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        app = ScriptedEngine(script=say(*["word "] * 50, delay=0.02))
        uvicorn.run(app, port=PORT, log_config=None, ws="none", access_log=False)
    else:
        command = [sys.executable, "-m", "tests.gateway.bench_transport", "engine"]
        with subprocess.Popen(command) as server:
            asyncio.run(main())
            server.terminate()
