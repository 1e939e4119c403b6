"""Schemas that the grammar library would not bound itself: refused by name, and at little cost."""

import resource
import subprocess
import sys
import time
from bisect import bisect
from typing import Any

import msgspec
import pytest

from engine.backends.prepare.checks import check_schemas
from engine.backends.prepare.prepared import Refused, RequestLimits
from engine.backends.prepare.preparer import Preparer
from engine.errors import SchemaRefused
from engine.protocol import Description, GenerateRequest, Message, Prompt, Sampling, TextPart
from engine.settings import DEMO_MODEL
from engine.text.renderer import ChatRenderer

Schema = dict[str, Any]

FORMS = {
    "reference": lambda inner: inner,
    "property": lambda inner: {"type": "object", "properties": {"a": inner}},
    "item": lambda inner: {"type": "array", "items": inner},
    "one of two": lambda inner: {"anyOf": [inner, {"type": "integer"}]},
    "all of two": lambda inner: {"allOf": [inner, {"title": "b"}]},
    "reference with more": lambda inner: {**inner, "minLength": 1},
}


def chain(length: int, form: Any) -> Schema:
    """Definitions that each name the next one."""
    made = {f"d{at}": form({"$ref": f"#/$defs/d{at + 1}"}) for at in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**made, f"d{length}": {"type": "string"}}}


def check(schema: Schema) -> None:
    check_schemas([("output_schema", schema)], RequestLimits())


def _passes(schema: Schema) -> bool:
    try:
        check(schema)
    except SchemaRefused:
        return False
    return True


def request_of(schema: Schema) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        scope="a" * 32,
        prompt=Prompt([Message("user", [TextPart("Go.")])]),
        sampling=Sampling(max_tokens=8),
        output_schema=schema,
    )


def with_pattern(pattern: str) -> Schema:
    return {"type": "object", "properties": {"a": {"pattern": pattern}}, "required": ["a"]}


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer.from_model(DEMO_MODEL)


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_of_references_is_refused_before_the_library_runs_out_of_stack(form: str) -> None:
    check(chain(100, FORMS[form]))
    with pytest.raises(SchemaRefused, match=r"^output_schema: \d+ levels with all that `\$ref`"):
        check(chain(900 if form == "property" else 1600, FORMS[form]))


def test_definitions_that_name_each_other_count_once() -> None:
    names = [f"d{at}" for at in range(30)]
    all_of_them = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    check({"$defs": {name: {"properties": all_of_them} for name in names}, "$ref": "#/$defs/d0"})
    check({"properties": {"next": {"$ref": "#"}}})


def test_a_reference_by_an_odd_pointer_counts_as_deep_as_the_schema() -> None:
    schema = {"properties": {f"p{at}": {"$ref": f"#odd{at}"} for at in range(400)}}
    with pytest.raises(SchemaRefused, match="levels with all"):
        check({"a": {"b": {"c": schema}}})
    listed = {"anyOf": [{"type": "object"}], "properties": {"a/b": {"$ref": "#/anyOf/0"}}}
    check({**listed, "not": {"$ref": "#/properties/a~1b"}})


@pytest.mark.parametrize("spelling", ["#/odd{}", "{}/large"])
def test_very_many_references_to_one_value_cost_no_more_than_their_bytes(spelling: str) -> None:
    references = [{"$ref": spelling.format(number)} for number in range(8_000)]
    begun = time.process_time()
    with pytest.raises(SchemaRefused, match="levels with all that"):
        check({"large": references})
    assert time.process_time() - begun < 3  # a walk for each of them took 14


@pytest.mark.parametrize("multiple", [999_983, 1e15 + 37, 0.999983, 123456.5, 86_400_000])
def test_a_multiple_of_many_digits_is_refused(multiple: float) -> None:
    with pytest.raises(SchemaRefused, match="as the digits of `multipleOf` > 100000 maximum"):
        check({"type": "number", "multipleOf": multiple})


@pytest.mark.parametrize("multiple", [0.01, 5, 1e-7, 10**6, 0.25, 86_400, True, "x"])
def test_a_usual_multiple_passes(multiple: object) -> None:
    check({"type": "number", "multipleOf": multiple})


def test_very_many_patterns_for_properties_are_refused() -> None:
    with pytest.raises(SchemaRefused, match="33 `patternProperties` of schemas > 32 maximum"):
        check({"patternProperties": {f"^a{at}$": {} for at in range(33)}})


@pytest.mark.skipif(sys.platform != "linux", reason="bounds its stack on Linux alone")
@pytest.mark.parametrize("soft, bound", [(8 << 20, 7 << 20), (resource.RLIM_INFINITY, 7 << 18)])
def test_a_worker_has_less_stack_than_the_engines_threads(soft: int, bound: int) -> None:
    """What ends a worker never ends the engine: the stack that bounds it is the smaller one."""
    code = (
        "import resource as r, engine.backends.prepare.worker as w;"
        f"r.setrlimit(r.RLIMIT_STACK, ({soft}, r.getrlimit(r.RLIMIT_STACK)[1]));"
        "w._bound_stack();"
        "print(r.getrlimit(r.RLIMIT_STACK)[0])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(told.stdout) == bound


@pytest.mark.skipif(sys.platform != "linux", reason="bounds its stack on Linux alone")
@pytest.mark.parametrize("form", FORMS)
def test_the_deepest_chain_that_is_not_refused_is_compiled_on_a_workers_stack(form: str) -> None:
    # The first one that is refused is one longer.
    length = 99 + bisect(range(100, 1600), 0, key=lambda n: not _passes(chain(n, FORMS[form])))
    code = (
        "import resource as r; hard = r.getrlimit(r.RLIMIT_STACK)[1];"
        "r.setrlimit(r.RLIMIT_STACK, (8 << 20, hard));"
        "import engine.backends.prepare.worker as w; w._bound_stack();"
        "from engine.text.renderer import ChatRenderer;"
        "import tests.engine.backends.prepare.test_schemas as t;"
        "renderer = ChatRenderer.from_model(t.DEMO_MODEL);"
        f"renderer.parser(t.request_of(t.chain({length}, t.FORMS[{form!r}]))); print('compiled')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, "compiled\n"), told.stderr


@pytest.mark.parametrize("pattern", ["((a{1000}){1000}){1000}", "a{1000000}", "(a{1000}b){1000}"])
def test_a_pattern_of_very_many_repetitions_costs_little(
    renderer: ChatRenderer, pattern: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.thread_time()
    renderer.parser(request_of(with_pattern(f"^{pattern}$")))
    # The library's own limits let the first one take a second and 300 MiB.
    assert time.thread_time() - begun < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@pytest.mark.parametrize("seconds, is_refused", [(0.0, True), (60.0, False)])
def test_a_grammar_that_takes_long_to_compile_is_refused(
    renderer: ChatRenderer, seconds: float, is_refused: bool
) -> None:
    description = Description(
        backend="native",
        model="demo",
        epoch="",
        max_context_tokens=4096,
        block_size=16,
        num_blocks=256,
        granularity=1,
        min_cache_tokens=32,
        capabilities=["structured_output"],
    )
    preparer = Preparer(renderer, description, RequestLimits(grammar_seconds=seconds))
    answer = preparer.generate(msgspec.json.encode(request_of(with_pattern("a{3}"))))
    assert isinstance(answer, Refused) == is_refused
    if isinstance(answer, Refused):
        assert "0 seconds to compile" in str(answer)
