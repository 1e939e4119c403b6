"""Every way a call on the engine can fail; the codes are the protocol's.

EngineError              500 internal
├── InvalidRequest       400 invalid_request
│   ├── PromptTooLong    400 prompt_too_long
│   └── SchemaRefused    400 invalid_request, its message is the client's to read
├── Unsupported          400 unsupported
├── Unauthorized         401 unauthorized
├── NotFound             404 not_found
├── DuplicateRequest     409 duplicate_request
├── NotReady             503 not_ready
└── Overloaded           529 overloaded
"""

from typing import ClassVar

from engine.protocol import STATUS_OF, ErrorCode


class EngineError(Exception):
    code: ClassVar[ErrorCode] = "internal"
    is_public: ClassVar[bool] = False

    @property
    def status(self) -> int:
        return STATUS_OF[self.code]


class InvalidRequest(EngineError):
    code: ClassVar[ErrorCode] = "invalid_request"


class PromptTooLong(InvalidRequest):
    code: ClassVar[ErrorCode] = "prompt_too_long"

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum")


class SchemaRefused(InvalidRequest):
    """A JSON schema of the request can't be guaranteed; says which and why."""

    is_public: ClassVar[bool] = True


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
