"""What is refused by name before it costs much: texts, stop strings, and schemas that the grammar
library would not bound itself."""

import resource
import subprocess
import sys
import time
from bisect import bisect
from functools import cache, reduce
from typing import Any

import msgspec
import pytest

from engine.backends.prepare.prepared import COUNT, GENERATE, Job, Refused
from engine.backends.prepare.preparer import Preparer
from engine.backends.prepare.schemas import check_schemas
from engine.errors import SchemaRefused
from engine.protocol import CountRequest, GenerateRequest, Sampling, Tool, ToolChoice
from tests.engine.backends.local import SCOPE, description, prompt, request
from tests.engine.text.templates import demo_renderer

Schema = dict[str, Any]

FORMS: dict[str, Any] = {
    "reference": lambda inner: inner,
    "property": lambda inner: {"type": "object", "properties": {"a": inner}},
    "item": lambda inner: {"type": "array", "items": inner},
    "one of two": lambda inner: {"anyOf": [inner, {"type": "integer"}]},
    "all of two": lambda inner: {"allOf": [inner, {"title": "b"}]},
    "reference with more": lambda inner: {**inner, "minLength": 1},
}
NESTED = reduce(lambda inner, _: FORMS["property"](inner), range(35), {"type": "string"})
TOO_LONG = "x " * 8_000_000


def chain(length: int, form: Any) -> Schema:
    """Definitions that each name the next one."""
    definitions = {f"d{at}": form({"$ref": f"#/$defs/d{at + 1}"}) for at in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def check(schema: Schema) -> None:
    check_schemas([("output_schema", schema)])


@cache
def deepest(form: str) -> int:
    """The longest chain that is not refused."""

    def is_refused(length: int) -> bool:
        try:
            check(chain(length, FORMS[form]))
        except SchemaRefused:
            return True
        return False

    return 99 + bisect(range(100, 1600), False, key=is_refused)


def preparer() -> Preparer:
    described = description(
        max_context_tokens=16_384,
        longest_token_bytes=93,
        capabilities=["tools", "forced_tools", "structured_output"],
    )
    return Preparer(demo_renderer(), described)


def refusal(wire_request: GenerateRequest | CountRequest) -> Refused | None:
    kind = GENERATE if isinstance(wire_request, GenerateRequest) else COUNT
    answer = preparer().answer(Job(kind, msgspec.json.encode(wire_request)))
    return answer if isinstance(answer, Refused) else None


def with_pattern(pattern: str) -> GenerateRequest:
    properties = {"a": {"pattern": pattern}}
    return request(output_schema={"type": "object", "properties": properties, "required": ["a"]})


def tool_of(num_properties: int) -> Tool:
    properties = {f"property_{i}": {"type": "string"} for i in range(num_properties)}
    return Tool("t", {"type": "object", "properties": properties})


@pytest.mark.parametrize(
    ("wire_request", "message"),
    [
        (
            request(prompt("q", tools=[tool_of(1025)]), tool_choice=ToolChoice("any")),
            "tools[0].input_schema: 1025 properties of schemas > 1024",
        ),
        (request(output_schema=NESTED), " levels > 64"),
        (request(output_schema={"enum": ["x" * 300_000]}), " bytes of schemas > 262144"),
        (
            request(sampling=Sampling(max_tokens=2, stop_sequences=["x"] * 1025)),
            "stop_sequences: at most 1024",
        ),
        (
            request(sampling=Sampling(max_tokens=2, stop_sequences=["x" * 70_000])),
            " 65536 bytes together",
        ),
        (request(TOO_LONG), "172044 tokens > 16383"),
        (CountRequest(SCOPE, prompt(TOO_LONG)), "172044 tokens > 16383"),
    ],
    ids=range(7),
)
def test_a_request_beyond_the_bounds_is_refused_by_name_and_at_little_cost(
    wire_request: GenerateRequest | CountRequest, message: str
) -> None:
    began = time.process_time()
    refused = refusal(wire_request)
    assert time.process_time() - began < 1.0
    assert refused is not None and message in refused.message
    assert refused.is_public or "schema" not in refused.message


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_references_is_refused_before_the_library_runs_out_of_stack(form: str) -> None:
    check(chain(100, FORMS[form]))
    with pytest.raises(SchemaRefused, match=r"^output_schema: \d+ levels with all that `\$ref`"):
        check(chain(900 if form == "property" else 1600, FORMS[form]))


NAMES = [f"d{at}" for at in range(30)]
EACH_OTHER = {name: {"$ref": f"#/$defs/{name}"} for name in NAMES}
BY_ODD_POINTERS = {"properties": {f"p{at}": {"$ref": f"#odd{at}"} for at in range(400)}}
MULTIPLE = "as the digits of `multipleOf` > 100000 maximum"


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {name: {"properties": EACH_OTHER} for name in NAMES}, "$ref": "#/$defs/d0"},
        {"properties": {"next": {"$ref": "#"}}},
        {
            "anyOf": [{"type": "object"}],
            "properties": {"a/b": {"$ref": "#/anyOf/0"}},
            "not": {"$ref": "#/properties/a~1b"},
        },
        *({"multipleOf": factor} for factor in (0.01, 5, 1e-7, 10**6, 0.25, 86_400, True, "x")),
    ],
    ids=range(11),
)
def test_definitions_naming_each_other_count_once_and_usual_multiples_pass(schema: Schema) -> None:
    check(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"a": {"b": {"c": BY_ODD_POINTERS}}}, "levels with all"),
        # A walk for each of these references took 14 seconds.
        ({"large": [{"$ref": f"#/odd{n}"} for n in range(8_000)]}, "levels with all that"),
        ({"large": [{"$ref": f"{n}/large"} for n in range(8_000)]}, "levels with all that"),
        *(
            ({"multipleOf": factor}, MULTIPLE)
            for factor in (999_983, 1e15 + 37, 0.999983, 86_400_000)
        ),
        (
            {"patternProperties": {f"^a{at}$": {} for at in range(33)}},
            "33 `patternProperties` of schemas > 32 maximum",
        ),
    ],
    ids=range(8),
)
def test_a_schema_that_costs_much_is_refused_at_little_cost(schema: Schema, message: str) -> None:
    begun = time.process_time()
    with pytest.raises(SchemaRefused, match=message):
        check(schema)
    assert time.process_time() - begun < 3


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}] * 2},
                "b": {"anyOf": [{"$ref": "#/$defs/a"}] * 2},
            },
            "type": "object",
            "properties": {"text": {"type": "string"}, "x": {"$ref": "#/$defs/a"}},
            "required": ["text", "x"],
        },
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ],
    ids=range(5),
)
def test_a_schema_without_an_end_is_refused_before_an_answer_begins(schema: Schema) -> None:
    refused = refusal(request(output_schema=schema))
    assert refused is not None and refused.is_public
    assert refused.message.endswith("what it requires refers to itself without an end")
    for ends in ({"type": "object"}, {"type": "string"}):
        assert refusal(request(output_schema={"anyOf": [{"$ref": "#"}, ends]})) is None


@pytest.mark.parametrize("pattern", ["(.{1,200}x){1,20}", "(.{0,100}a){5}"])
def test_a_pattern_that_outgrows_the_library_is_refused_before_an_answer(pattern: str) -> None:
    refused = refusal(with_pattern(pattern))
    assert refused is not None and refused.is_public
    assert refused.message.startswith("output_schema: can't be guaranteed: pattern: ")
    assert refusal(with_pattern("^[a-z]{3,200}@[a-z]{2,64}[.]com$")) is None


STACK = """
import resource as r, engine.backends.prepare.worker as w
r.setrlimit(r.RLIMIT_STACK, ({soft}, r.getrlimit(r.RLIMIT_STACK)[1]))
w.bound_stack()
print(r.getrlimit(r.RLIMIT_STACK)[0])
"""
COMPILE = """
import tests.engine.backends.prepare.test_bounds as t
for form in t.FORMS:
    schema = t.chain(t.deepest(form), t.FORMS[form])
    t.demo_renderer().parser(t.request(output_schema=schema))
    print(form)
"""


def output_of(program: str) -> list[str]:
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not process.returncode, process.stderr
    return process.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="bounds its stack on Linux alone")
def test_a_worker_has_less_stack_than_the_engine_and_compiles_the_deepest_chains_on_it() -> None:
    """What ends a worker never ends the engine: the stack that bounds it is the smaller one."""
    assert output_of(STACK.format(soft=resource.RLIM_INFINITY)) == [str(7 << 18)]
    assert output_of(STACK.format(soft=8 << 20) + COMPILE) == [str(7 << 20), *FORMS]


@pytest.mark.parametrize("pattern", ["((a{1000}){1000}){1000}", "a{1000000}", "(a{1000}b){1000}"])
def test_a_pattern_of_very_many_repetitions_costs_little(pattern: str) -> None:
    demo_renderer().parser(with_pattern("^a$"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.thread_time()
    with pytest.raises(SchemaRefused, match="too many expressions"):
        demo_renderer().parser(with_pattern(f"^{pattern}$"))
    # The library's own limits let the first one take a second and 300 MiB.
    assert time.thread_time() - begun < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
