"""A query parameter that is not what the description says is refused, on every route.

Routes, parameters and bad values all come from the served description.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Stack
from tests.gateway.operations import DOCUMENT
from tests.gateway.serving import ADMIN_KEY, API_KEY

Values = list[str]
NO_NUMBERS = [
    *("null", "None", "", " ", "1.0", "60.5", "1e3", "true", "false", "NaN", "Infinity", "+100"),
    *("0x64", "1_00", "0100", "-0", " 100", "100 ", "\u0661\u0660\u0660", str(10**30), "9" * 5000),
]
NO_BOOLEANS = ["null", "", "1", "0", "yes", "no", "on", "True", "FALSE", "t", "1.0"]
ROUTES = [
    (path, method, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if any(parameter["in"] == "query" for parameter in operation["parameters"])
]


def good(schema: dict[str, Any]) -> str:
    """A value that is what a parameter's schema says."""
    schema = schema.get("items", schema)
    if "enum" in schema:
        return str(schema["enum"][0])
    match schema["type"]:
        case "integer":
            return str(schema.get("default", schema["minimum"]))
        case "boolean":
            return "true"
        case _:
            return "a"


def bad(schema: dict[str, Any]) -> Iterator[Values]:
    """Lists of values that are not."""
    is_list = schema["type"] == "array"
    if not is_list:
        yield [good(schema)] * 2
        yield [good(schema), ""]
    schema = schema.get("items", schema)
    if "enum" in schema:
        wrong = ["null", "", "None", str(schema["enum"][0]).upper(), f" {schema['enum'][0]}"]
    elif schema["type"] == "integer":
        wrong = [*NO_NUMBERS, str(schema["minimum"] - 1), str(schema["maximum"] + 1)]
    elif schema["type"] == "boolean":
        wrong = NO_BOOLEANS
    else:
        wrong = ["a" * (schema["maxLength"] + 1)] if "maxLength" in schema else []
        wrong += [""] if schema.get("minLength") else []
        wrong += ["a\0"] if "pattern" in schema else []
    for value in wrong:
        yield [value]
        if is_list:
            yield [good(schema), value]


def ask(http: httpx.Client, path: str, method: str, query: dict[str, Values]) -> httpx.Response:
    return http.request(method, path.replace("{", "").replace("}", ""), params=query)


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("path", "method", "operation"), ROUTES, ids=lambda value: str(value)[:40])
def test_every_bad_value_of_every_parameter_is_a_400_that_names_it(
    http: httpx.Client, path: str, method: str, operation: dict[str, Any]
) -> None:
    is_admin = {"adminKey": []} in operation["security"]
    http.headers["x-api-key"] = ADMIN_KEY if is_admin else API_KEY
    if not is_admin:
        http.headers["anthropic-version"] = "2023-06-01"
    declared = [parameter for parameter in operation["parameters"] if parameter["in"] == "query"]
    needed = {
        parameter["name"]: [good(parameter["schema"])]
        for parameter in declared
        if parameter["required"]
    }
    for parameter in declared:
        name = parameter["name"]
        for values in bad(parameter["schema"]):
            reply = ask(http, path, method, {**needed, name: values})
            assert reply.status_code == 400, (name, values, reply.text)
            error = reply.json()["error"]
            kind = error["type"] if "type" in error else error["status"]
            assert kind in ("invalid_request_error", "INVALID_ARGUMENT")
            assert error["message"].startswith(f"{name}: "), (name, values, error)
            assert len(error["message"]) < 200
        if parameter["required"]:
            other_fields = {key: value for key, value in needed.items() if key != name}
            message = ask(http, path, method, other_fields).json()["error"]["message"]
            assert message.startswith(f"{name}: is required")


def test_all_bad_parameters_are_named_at_once_and_undeclared_ones_are_ignored(
    http: httpx.Client,
) -> None:
    headers = {"x-api-key": ADMIN_KEY}
    reply = http.get("/admin/v1/usage?since_ms=a&until_ms=null&workspace=", headers=headers)
    assert reply.json()["error"]["message"] == (
        "since_ms: must be a whole number from 0 to 253402300799000;"
        " until_ms: must be a whole number from 0 to 253402300799000;"
        " workspace: must be a text of 1 to 64 characters"
    )
    assert http.get("/admin/v1/usage?beta=true&beta=", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["admin/v1/turns/%00", "v1/messages/batches/a%00"])
def test_nothing_has_a_name_with_a_nul(http: httpx.Client, path: str) -> None:
    """PostgreSQL takes none, and what the database refuses was a 500."""
    key = ADMIN_KEY if path.startswith("admin") else API_KEY
    assert http.get(f"/{path}", headers={"x-api-key": key}).status_code == 404
