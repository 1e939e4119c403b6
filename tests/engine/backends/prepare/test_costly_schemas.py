"""Schemas and patterns that take too much to compile, through real workers: found once, ended by
processor time, and no hindrance to others."""

import asyncio
import gc
import random
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends.local import LocalBackend
from engine.backends.prepare.loads import Grammars, ScopeLoads
from engine.backends.prepare.prepared import MayCompile, Verdict
from engine.errors import PreparationFull, SchemaTooCostly, TooCostly, rebuilt
from engine.heap import trim_heap
from engine.protocol import ALLOWED_TOOLS, GenerateRequest, Tool, ToolChoice
from tests.engine.backends.local import SCOPE, finish, prompt, request, serving
from tests.engine.backends.prepare.test_workers import children
from tests.faults.attacks import costly_schema

pytestmark = pytest.mark.anyio

SECONDS = 1.0
CAPABILITIES = ["copy_on_write", "tools", "forced_tools", "structured_output", "strict_tools"]
COSTLY = costly_schema(random.Random(1))
ANOTHER = costly_schema(random.Random(2))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def engine() -> AsyncIterator[LocalBackend]:
    bounds = {"GRAMMAR_SECONDS": SECONDS}
    async with serving(described={"capabilities": CAPABILITIES}, bounds=bounds) as local_engine:
        yield local_engine


def held_to(schema: dict[str, Any], scope: str = SCOPE) -> GenerateRequest:
    return request(output_schema=schema, scope=scope)


async def refused(engine: LocalBackend, generate_request: GenerateRequest) -> str:
    """Why the grammar takes too much."""
    with pytest.raises(SchemaTooCostly) as error:
        await engine.open(generate_request)
    assert error.value.code == "too_costly" and error.value.is_public
    return str(error.value)


FORCED = ToolChoice("any")
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"output_schema": COSTLY}, "output_schema: its grammar"),
    "tool": (
        {"of": prompt("q", tools=[Tool("t", COSTLY)]), "tool_choice": FORCED},
        "tools[0].input_schema: its grammar",
    ),
    "several": (
        {
            "of": prompt("q", tools=[Tool("t", COSTLY), Tool("u", ANOTHER)]),
            "tool_choice": FORCED,
        },
        "the schemas are too much together: their grammar",
    ),
}


@pytest.mark.parametrize("kind", CASES)
async def test_a_costly_schema_is_refused_by_field_and_bound_and_found_once(
    engine: LocalBackend, kind: str
) -> None:
    """It was computed for eight seconds, twice."""
    fields, field = CASES[kind]
    message = await refused(engine, request(**fields))
    assert message == f"{field} takes more than 1 seconds of processor time to compile"
    await finish(engine, request())
    began = time.monotonic()
    assert await refused(engine, request(**fields)) == message
    assert time.monotonic() - began < SECONDS
    # What one scope found says nothing to another.
    assert await refused(engine, request(scope="c" * 32, **fields)) == message


async def test_where_others_take_the_processor_a_costly_schema_is_still_found_once() -> None:
    """The wall's end came first, and forgot the schema: 16 seconds, and `503`, each time."""
    bounds = {"GRAMMAR_SECONDS": SECONDS, "PREPARE_SECONDS": 0.2}
    async with serving(described={"capabilities": CAPABILITIES}, bounds=bounds) as engine:
        with pytest.raises(PreparationFull):
            await engine.open(held_to(COSTLY))
        # Who asks again meanwhile compiles nothing, and waits until it is known.
        message = await refused(engine, held_to(COSTLY))
        assert "takes more than 1 seconds of processor time" in message
        began = time.monotonic()
        assert await refused(engine, held_to(COSTLY)) == message
        assert time.monotonic() - began < SECONDS


async def test_a_schema_whose_client_leaves_is_found_once_too(
    engine: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was forgotten, so that each try cost its time, and a worker's start."""
    verdicts = list[Verdict]()
    begin = Grammars.begin

    def begun(grammars: Grammars, digest: bytes, *, any_grammar: bool) -> MayCompile:
        answer = begin(grammars, digest, any_grammar=any_grammar)
        verdicts.append(answer.verdict)
        return answer

    monkeypatch.setattr(Grammars, "begin", begun)
    schema = costly_schema(random.Random(4))
    opening = asyncio.create_task(engine.open(held_to(schema)))
    async with asyncio.timeout(180):
        while "yes" not in verdicts:
            await asyncio.sleep(0.01)
    opening.cancel()
    await asyncio.wait([opening])
    await refused(engine, held_to(schema))
    assert verdicts.count("yes") == 1


async def test_memory_of_grammars_comes_back() -> None:
    """Workers kept what a grammar of some hundred MB had taken, engines what they compiled."""

    def resident(process: int | str) -> float:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    # Each is below the bound, and takes about 50 MB.
    schemas = [costly_schema(random.Random(number), 1) for number in range(6)]
    async with serving(described={"capabilities": CAPABILITIES}) as engine:
        await finish(engine, held_to({"type": "string"}))
        gc.collect()
        before = resident("self"), [resident(child) for child in children()]
        for number, schema in enumerate(schemas):
            await finish(engine, held_to(schema, f"{number:032x}"))
        gc.collect()
        trim_heap()  # the server does every 20 seconds
        assert resident("self") - before[0] < 50
        for child in children():
            assert resident(child) - max(before[1]) < 25


async def test_strict_tools_that_cost_too_much_are_not_held_and_the_turn_is_served(
    engine: LocalBackend,
) -> None:
    tools = [Tool("t", COSTLY, strict=True)]
    for _ in range(2):
        began = await finish(engine, request(prompt("q", tools=tools)))
        (unheld,) = began.unheld
        assert unheld.tool == "t" and "takes more than 1 seconds" in unheld.reason


async def test_a_choice_of_tools_that_costs_too_much_is_not_held_and_told(
    engine: LocalBackend,
) -> None:
    """The model may call the other tool too then, so the client hears that."""
    tools = [Tool("t", COSTLY, strict=True), Tool("u", {"type": "object"})]
    choice = ToolChoice("auto", names=["t"])
    for _ in range(2):
        began = await finish(engine, request(prompt("q", tools=tools), tool_choice=choice))
        reasons = {unheld.tool: unheld.reason for unheld in began.unheld}
        assert reasons.keys() == {"t", ALLOWED_TOOLS}
        assert all("takes more than 1 seconds" in reason for reason in reasons.values())
    cheap = [Tool(tool.name, {"type": "object"}, strict=tool.strict) for tool in tools]
    began = await finish(engine, request(prompt("q", tools=cheap), tool_choice=choice))
    assert not began.unheld


async def test_scopes_with_costly_schemas_leave_the_last_worker_to_others() -> None:
    """Others waited for as long as all workers computed."""
    rng = random.Random(3)
    num_ended = 0
    bounds = {"GRAMMAR_SECONDS": 2 * SECONDS, "WAIT_SECONDS": 600.0}
    async with serving(described={"capabilities": CAPABILITIES}, bounds=bounds) as engine:
        # All workers start.
        long = "hello world, what is it 12 " * 700
        await asyncio.gather(*(finish(engine, request(long, scope=name * 32)) for name in "abc"))

        async def attack(scope: str) -> None:
            nonlocal num_ended
            with pytest.raises(SchemaTooCostly):
                await engine.open(held_to(costly_schema(rng), scope))
            num_ended += 1

        attacks = [asyncio.create_task(attack(scope * 32)) for scope in "aaabbbddd"]
        num_turns = 0
        while num_ended < 3:
            await finish(engine, request(scope="c" * 32))
            num_turns += 1
            await asyncio.sleep(0.01)
        # A schema that nobody has asked for yet has its turn among theirs.
        ordinary = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}
        await finish(engine, held_to(ordinary, "c" * 32))
        assert num_ended < len(attacks)
        await asyncio.gather(*attacks)
    # A turn that waited for a worker would end with an attack: there would be three or four.
    assert num_turns > 10


async def test_a_message_of_a_costly_schema_stays_public_in_another_process() -> None:
    error = rebuilt("too_costly", "output_schema: its grammar", is_public=True)
    assert isinstance(error, SchemaTooCostly) and str(error) == "output_schema: its grammar"
    assert type(rebuilt("too_costly", "memory", is_public=False)) is TooCostly


def test_a_scope_is_slow_beyond_its_share_of_a_worker_and_no_longer_than_that() -> None:
    loads = ScopeLoads()
    for moment in range(100):  # a long request in between, and many short ones
        loads.begin("short", moment)
        loads.end("short", moment + 0.2)
        assert not loads.is_slow("short", moment + 0.2)
    loads.begin("long", 100.0)
    assert not loads.is_slow("long", 100.9)
    assert loads.is_slow("long", 101.1) and loads.num_slow(101.1) == 1
    loads.end("long", 103.0)
    assert loads.num_slow(103.0) == 0
    assert loads.is_slow("long", 110.0)
    assert not loads.is_slow("long", 111.1)
