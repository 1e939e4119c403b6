"""Every way a call on the engine can fail; the codes are the protocol's.

EngineError            500 internal
├── InvalidRequest     400 invalid_request
│   ├── PromptTooLong  400 prompt_too_long
│   └── PublicRefusal  400 invalid_request       of a schema, image, field, adapter
├── TooCostly          400 too_costly
│   └── SchemaTooCostly  400 too_costly          of schemas and patterns, by name
├── Unsupported        400 unsupported
├── Unauthorized       401 unauthorized
├── NotFound           404 not_found
├── DuplicateRequest   409 duplicate_request
├── NotReady           503 not_ready
└── Overloaded         529 overloaded
    └── PreparationFull  529 overloaded          of this request, others may be taken
"""

from typing import ClassVar

from engine.protocol import STATUS_OF, ErrorCode, Image


class EngineError(Exception):
    code: ClassVar[ErrorCode] = "internal"
    is_public: ClassVar[bool] = False
    only_this: ClassVar[bool] = False

    @property
    def status(self) -> int:
        return STATUS_OF[self.code]


class InvalidRequest(EngineError):
    """The message stays inside: see PublicRefusal."""

    code: ClassVar[ErrorCode] = "invalid_request"


class PromptTooLong(InvalidRequest):
    code: ClassVar[ErrorCode] = "prompt_too_long"

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum")


class PublicRefusal(InvalidRequest):
    """The message may be shown to the client. It names what is refused, and says why."""

    is_public: ClassVar[bool] = True


class SchemaRefused(PublicRefusal):
    """A JSON schema of the request can't be guaranteed."""


class ImageRefused(PublicRefusal):
    """An image can't be shown to the model."""

    def __init__(self, image: Image) -> None:
        super().__init__(f"{image.reference}: Could not process image")


class FieldRefused(PublicRefusal):
    """What a field asks for can't be done with this prompt, or by this engine."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")


class AdapterRefused(PublicRefusal):
    """An adapter is not loaded."""

    def __init__(self, why: str) -> None:
        super().__init__(f"adapter {why}")


class TooCostly(EngineError):
    """The request takes more time or memory than one request gets.

    Another engine would refuse it too, after the same time.
    """

    code: ClassVar[ErrorCode] = "too_costly"

    def __init__(self, what: str) -> None:
        """`what` is the resource, such as time or memory."""
        super().__init__(f"the prompt, its tools or its schemas take too much to prepare: {what}")


class SchemaTooCostly(TooCostly):
    """The grammar of a schema or a pattern takes too much to compile.

    The message may be shown to the client. It names the field and the bound.
    """

    is_public: ClassVar[bool] = True

    def __init__(self, message: str) -> None:
        EngineError.__init__(self, message)


class Unsupported(EngineError):
    code: ClassVar[ErrorCode] = "unsupported"


class Unauthorized(EngineError):
    code: ClassVar[ErrorCode] = "unauthorized"


class NotFound(EngineError):
    code: ClassVar[ErrorCode] = "not_found"


class DuplicateRequest(EngineError):
    code: ClassVar[ErrorCode] = "duplicate_request"


class NotReady(EngineError):
    code: ClassVar[ErrorCode] = "not_ready"


class Overloaded(EngineError):
    code: ClassVar[ErrorCode] = "overloaded"


class PreparationFull(Overloaded):
    """No worker was free to prepare this request in its time.

    Other requests may find a worker: this one was long, or its scope had its share.
    """

    only_this: ClassVar[bool] = True


def rebuilt(code: ErrorCode, message: str, *, is_public: bool) -> EngineError:
    """Make an error of another process again from its code and message."""
    kind = _PUBLIC.get(code, PublicRefusal) if is_public else _KINDS.get(code, EngineError)
    return kind.__new__(kind, message)


_known: list[type[EngineError]] = [*EngineError.__subclasses__(), PromptTooLong]
_KINDS: dict[ErrorCode, type[EngineError]] = {kind.code: kind for kind in _known}
_PUBLIC: dict[ErrorCode, type[EngineError]] = {SchemaTooCostly.code: SchemaTooCostly}
