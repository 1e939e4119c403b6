"""What JSON of a client may have before anything is made of it: depth, integers, and for a
schema also bytes, values and properties."""

from typing import Any

import msgspec

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest

MAX_DEPTH = 64
_INT_LIMIT = 2**63
_encode = msgspec.json.Encoder().encode


def check_schema(schema: dict[str, Any], path: str, bounds: RequestBounds) -> None:
    """Raise InvalidRequest, with `path` in front, for the first bound that it breaks."""
    level: list[Any] = [schema]
    num_values = num_properties = 0
    for _ in range(bounds.max_schema_depth):
        num_values += len(level)
        if num_values > bounds.max_schema_values:
            raise InvalidRequest(f"{path}: more than {bounds.max_schema_values} values")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                properties = item.get("properties")
                if isinstance(properties, dict):
                    num_properties += len(properties)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and not -_INT_LIMIT <= item < _INT_LIMIT:
                raise InvalidRequest(f"{path}: integers must fit in 64 bits")
        if num_properties > bounds.max_schema_properties:
            raise InvalidRequest(f"{path}: more than {bounds.max_schema_properties} properties")
        if not below:
            break
        level = below
    else:
        raise InvalidRequest(f"{path}: nested more than {bounds.max_schema_depth} levels deep")
    if len(_encode(schema)) > bounds.max_schema_bytes:
        raise InvalidRequest(f"{path}: longer than {bounds.max_schema_bytes} bytes")


def check_json(value: dict[str, Any], path: str) -> None:
    """Refuse what cannot cross to the engine: nesting beyond MAX_DEPTH, integers beyond 64 bits."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            for child in children:
                if isinstance(child, dict | list):
                    below.append(child)
                elif isinstance(child, int) and not -_INT_LIMIT <= child < _INT_LIMIT:
                    raise InvalidRequest(f"{path}: integers must fit in 64 bits")
        if not below:
            return
        level = below
    raise InvalidRequest(f"{path}: nested more than {MAX_DEPTH} levels deep")
