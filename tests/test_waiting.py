"""No test fails on a busy machine because it waited for a short time only."""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CALLS = {"delete", "get", "head", "post", "put", "request", "stream", "AsyncClient", "Client"}
SDKS = {"Anthropic", "AsyncAnthropic", "OpenAI", "AsyncOpenAI"}
LEAST_SECONDS = 60


@cache
def calls() -> list[tuple[str, ast.Call]]:
    return [
        (f"{path.relative_to(TESTS)}:{node.lineno}", node)
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
    ]


def is_of_httpx(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="httpx"), attr=name):
            return name in CALLS
    return False


def name_of(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def test_every_request_says_how_long_it_waits() -> None:
    """Without it httpx gives up after five seconds."""
    known = {"timeout", "transport", None}
    assert [
        place
        for place, call in calls()
        if is_of_httpx(call) and not known & {keyword.arg for keyword in call.keywords}
    ] == []


def test_every_client_of_an_sdk_says_how_long_it_waits() -> None:
    """Without it the SDKs give up after five seconds without a connection."""
    known = {"timeout", "http_client", None}
    assert [
        place
        for place, call in calls()
        if name_of(call) in SDKS and not known & {keyword.arg for keyword in call.keywords}
    ] == []


def test_nobody_waits_less_than_a_minute_for_what_happens_sooner_or_later() -> None:
    short = []
    for place, call in calls():
        match call:
            case ast.Call(
                func=ast.Name(id="eventually"),
                args=[_, ast.Constant(value=float() | int() as seconds)],
            ):
                short += [place] if seconds < LEAST_SECONDS else []
    assert short == []
