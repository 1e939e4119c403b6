"""What a JSON Schema may have before anything is made of it: bytes, depth, values, properties."""

from typing import Any

import msgspec

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.prompt.layout import INT_LIMIT

_encode = msgspec.json.Encoder().encode


def check_schema(schema: dict[str, Any], path: str, bounds: RequestBounds) -> None:
    """Raise InvalidRequest, with `path` in front, for the first bound that it breaks."""
    level: list[Any] = [schema]
    num_values = num_properties = 0
    for _ in range(bounds.max_schema_depth):
        num_values += len(level)
        if num_values > bounds.max_schema_values:
            raise InvalidRequest(f"{path}: more than {bounds.max_schema_values} values")
        num_properties += sum(_num_properties(item) for item in level)
        if num_properties > bounds.max_schema_properties:
            raise InvalidRequest(f"{path}: more than {bounds.max_schema_properties} properties")
        level = [child for item in level for child in _children(item, path)]
        if not level:
            break
    else:
        raise InvalidRequest(f"{path}: nested more than {bounds.max_schema_depth} levels deep")
    if len(_encode(schema)) > bounds.max_schema_bytes:
        raise InvalidRequest(f"{path}: longer than {bounds.max_schema_bytes} bytes")


def _num_properties(item: Any) -> int:
    properties = item.get("properties") if isinstance(item, dict) else None
    return len(properties) if isinstance(properties, dict) else 0


def _children(item: Any, path: str) -> list[Any]:
    match item:
        case dict():
            return list(item.values())
        case list():
            return item
        case int() if not -INT_LIMIT <= item < INT_LIMIT:
            raise InvalidRequest(f"{path}: integers must fit in 64 bits")
        case _:
            return []
