"""Values written as elements: what they stand for is told by the schema."""

from typing import Any

import pytest

from engine.text.formats import element_values
from engine.text.formats.element_values import value_of_elements

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
        "none": {"type": "array"},
    },
    "$defs": {"row": {"type": "object", "properties": {"id": {"type": "string"}}}},
}


def written(text: str) -> str:
    return text.replace("<", "~<")


def read(text: str, schema: Any = SCHEMA) -> Any:
    return value_of_elements(written(text), "~", schema, SCHEMA)


def test_elements_are_lists_and_objects_by_the_schema() -> None:
    rows = "<rows><item><id>7</id></item><item><id>8</id></item></rows>"
    text = f"<name>true</name><count>3</count>{rows}<none></none>"
    expected = {"name": "true", "count": 3, "rows": [{"id": "7"}, {"id": "8"}], "none": []}
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("<item>1</item><item>a</item>", {}, [1, "a"]),
        ("<item>1</item>", {"type": "object"}, {"item": 1}),
        ("<a>1</a><b><c>x</c></b>", None, {"a": 1, "b": {"c": "x"}}),
        ("", {"type": "object"}, {}),
        ("", {"type": "string"}, ""),
        ("<a>1</a>", {"type": "string"}, written("<a>1</a>")),
        ("some <a>1</a>", {}, written("some <a>1</a>")),
        ("<a>1</b>", {}, written("<a>1</b>")),
        ("<a>1", {}, written("<a>1")),
    ],
)
def test_what_is_no_element_is_text(text: str, schema: Any, value: Any) -> None:
    assert read(text, schema) == value


def test_markup_without_the_prefix_is_text() -> None:
    assert value_of_elements("<item>1</item>", "~", {}, SCHEMA) == "<item>1</item>"


def test_a_deep_nest_ends() -> None:
    text = "<a>" * 500 + "</a>" * 500
    value, depth = read(text, None), 0
    while isinstance(value, dict):
        value, depth = value["a"], depth + 1
    assert 10 < depth < 100 and isinstance(value, str)


def test_a_schema_is_looked_at_once_however_many_elements_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[object] = []
    real = element_values.types_of
    monkeypatch.setattr(
        element_values, "types_of", lambda *given: (looked.append(given[0]), real(*given))[1]
    )
    items = {"type": "array", "items": {"anyOf": [{"type": "integer"}] * 100}}
    text = "~<item>1~</item>" * 500
    assert value_of_elements(text, "~", items, {}) == [1] * 500
    assert len(looked) == 2
