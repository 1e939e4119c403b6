"""The bodies of cachedContents, and their times.

A lifetime comes as `ttl` (`"300s"`) or as `expireTime` (RFC 3339).
"""

import re
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest
from gateway.dialects.collector import Holdfast
from gateway.dialects.gemini.request import FIELDS, Prompted, Shape, decode
from gateway.dialects.gemini.response import Answered

DEFAULT_SECONDS = 3600.0
_TTL = re.compile(r"(\d{1,9})(?:\.(\d{1,9}))?s", re.ASCII)
_MAX_NAME = 128
_Aware = Annotated[datetime, msgspec.Meta(tz=True)]
PREFIX = "cachedContents/"


class CreateRequest(Prompted):
    """What is only ever answered may stand in the body and is not read."""

    display_name: str = ""
    ttl: str | None = None
    expire_time: str | None = None
    name: Any = None
    create_time: Any = None
    update_time: Any = None
    usage_metadata: Any = None

    @property
    def prompted(self) -> Prompted:
        return Prompted(self.contents, self.system_instruction, self.tools, self.tool_config)


class UpdateRequest(Shape):
    """Only the lifetime may change."""

    ttl: str | None = None
    expire_time: str | None = None
    name: Any = None
    model: Any = None
    display_name: Any = None
    create_time: Any = None
    update_time: Any = None
    usage_metadata: Any = None


class CacheUsage(Answered, frozen=True, rename="camel", kw_only=True):
    total_token_count: int


class CachedContent(Answered, frozen=True, rename="camel", kw_only=True):
    """`holdfast` is there where the call had an engine hold it: what that engine did."""

    name: str
    model: str
    display_name: str | UnsetType = UNSET
    create_time: datetime
    update_time: datetime
    expire_time: datetime
    usage_metadata: CacheUsage
    holdfast: Holdfast | UnsetType = UNSET


class CachedContentList(Answered, frozen=True, rename="camel", kw_only=True):
    cached_contents: list[CachedContent] | UnsetType = UNSET
    next_page_token: str | UnsetType = UNSET


class Nothing(Answered, frozen=True, rename="camel", kw_only=True):
    """The answer to a deletion."""


def decode_create(body: bytes, bounds: RequestBounds) -> CreateRequest:
    request = decode(body, CreateRequest, bounds)
    request.model = request.model.removeprefix("models/")
    if not request.model:
        raise InvalidRequest("model: is required")
    if len(request.display_name) > _MAX_NAME or "\0" in request.display_name:
        raise InvalidRequest(f"displayName: may have at most {_MAX_NAME} characters, and no NUL")
    FIELDS.check(msgspec.structs.replace(request.prompted, model=request.model), bounds)
    if not (request.contents or request.system_instruction or request.tools):
        raise InvalidRequest("contents: a cached content must have contents, tools or instructions")
    return request


def decode_update(body: bytes, bounds: RequestBounds) -> UpdateRequest:
    return decode(body, UpdateRequest, bounds)


def expiry_of(
    request: CreateRequest | UpdateRequest, now: datetime, most_seconds: float
) -> datetime | None:
    """The time at which it ends, None where the body says none. Raise InvalidRequest."""
    if request.ttl is not None and request.expire_time is not None:
        raise InvalidRequest("ttl: excludes expireTime")
    if request.ttl is not None:
        field, match = "ttl", _TTL.fullmatch(request.ttl)
        if match is None:
            raise InvalidRequest("ttl: must be seconds, such as '300s'")
        seconds = float(f"{match[1]}.{match[2] or 0}")
    elif request.expire_time is not None:
        field = "expireTime"
        try:
            seconds = (msgspec.convert(request.expire_time, type=_Aware) - now).total_seconds()
        except msgspec.ValidationError:
            message = "expireTime: must be a time as RFC 3339 writes it, with its zone"
            raise InvalidRequest(message) from None
    else:
        return None
    if seconds <= 0:
        raise InvalidRequest(f"{field}: must be in the future")
    if seconds > most_seconds:
        raise InvalidRequest(f"{field}: may be at most {most_seconds:g} seconds from now")
    return now + timedelta(seconds=seconds)
