"""Every way a request to the gateway can fail. The message is for the client, in the wire's words.

GatewayError               500 api_error
├── InvalidRequest         400 invalid_request_error
│   ├── PromptTooLong      400 invalid_request_error
│   ├── ResponseNotKept    400 invalid_request_error     an earlier response is named, none is kept
│   ├── ThreadNotFound     400 invalid_request_error     no conversation is kept
│   └── DemandRefused      400 invalid_request_error     the model can't be held to that output
├── Unauthenticated        401 authentication_error
│   └── MissingKey         401 authentication_error
├── SpendLimitReached      402 billing_error             the workspace's month is used up
├── Forbidden              403 permission_error
│   └── SampleData         403 permission_error          the database holds sample data only
├── NotFound               404 not_found_error
│   └── ModelNotFound      404 not_found_error           the ids that are served are told
├── MethodNotAllowed       405 invalid_request_error
├── RequestTimeout         408 invalid_request_error     the request did not come whole in time
│   ├── HeadTimeout        408 invalid_request_error
│   └── BodyTimeout        408 invalid_request_error
├── TooLarge               413 request_too_large
├── UnsupportedMedia       415 invalid_request_error
├── HeadTooLarge           431 invalid_request_error     too many headers, or too long ones
├── RateLimited            429 rate_limit_error          the workspace's limit is reached
│   └── TooManyUnknownKeys 429 rate_limit_error          more than are looked up
├── ClientGone             499 api_error                 nobody is left to read it
├── EngineFailed           500 api_error                 the engine gave up or broke the protocol
│   └── EngineRefusesSecret 500 api_error                the secrets of gateway and engine differ
├── EngineLost             500 api_error                 the connection to the engine broke
├── JournalUnavailable     500 api_error                 the turn could not be recorded
├── EngineTimeout          504 timeout_error             the engine fell silent over a turn
├── LedgerRefused          500 api_error                 the database can't hold such a row
└── Overloaded             529 overloaded_error
    ├── NoEngineReady      529 overloaded_error
    ├── NotServed          529 overloaded_error          lost or not taken before the first byte
    ├── JournalFull        529 overloaded_error          no room to record another turn
    └── LedgerUnavailable  529 overloaded_error          the database is away or too slow
        ├── LedgerNotMigrated 529 overloaded_error       it lacks tables or columns
        ├── LedgerDamaged  529 overloaded_error          its file is broken
        └── LedgerReplaced 529 overloaded_error          it is another one than before
"""

from collections.abc import Sequence
from typing import ClassVar


class GatewayError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "api_error"
    default: ClassVar[str] = "internal server error"

    def __init__(self, message: str | None = None, param: str | None = None) -> None:
        """`param` is the wrong field's path, if the message does not begin with it."""
        super().__init__(message or self.default)
        self.param = param


class InvalidRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    default = "invalid request"


class PromptTooLong(InvalidRequest):
    """Both counts are None where the engine did not tell them."""

    default = "prompt is too long"

    def __init__(self, num_tokens: int | None = None, max_tokens: int | None = None) -> None:
        known = num_tokens is not None and max_tokens is not None
        detail = f": {num_tokens} tokens > {max_tokens} maximum" if known else ""
        super().__init__(f"{self.default}{detail}")
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


class ResponseNotKept(InvalidRequest):
    """A request names an earlier response. No gateway keeps one."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Previous response with id '{response_id}' not found: this server keeps no responses,"
            " send the whole conversation as `input`, as clients do with `store` set to false.",
            "previous_response_id",
        )


class ThreadNotFound(InvalidRequest):
    """No conversation is kept. A client that gets this sends the whole one."""

    default = "thread.previous_message_id: no such thread; send the whole conversation"
    code = "thread_not_found"


class DemandRefused(InvalidRequest):
    """A tool or a schema that output can't be held to.

    The message begins with the field as the engine protocol names it: `output_schema`, or
    `tools[0].input_schema`. Each dialect says it in its own names.
    """


class Unauthenticated(GatewayError):
    status = 401
    type = "authentication_error"
    default = "invalid x-api-key"


class MissingKey(Unauthenticated):
    default = "x-api-key header is required"


class SpendLimitReached(GatewayError):
    status = 402
    type = "billing_error"
    default = "the workspace has reached its spend limit for this month"


class Forbidden(GatewayError):
    status = 403
    type = "permission_error"
    default = "not permitted"


class SampleData(Forbidden):
    """The database holds sample data. It takes no real rows, and no turn is served on it."""

    default = "this gateway shows sample data and serves no turns"


class NotFound(GatewayError):
    status = 404
    type = "not_found_error"
    default = "not found"


class ModelNotFound(NotFound):
    """A model id that nothing serves. `served` are ids that clients may ask for."""

    def __init__(self, requested: str, served: Sequence[str]) -> None:
        self.requested, self.served = requested[:128], [one[:128] for one in served[:5]]
        super().__init__(f"model: {self.requested}{self.told('; ')}")

    def told(self, before: str) -> str:
        """Which ids are served, for the end of a message; empty where there are none."""
        return f"{before}served here: {', '.join(self.served)}" if self.served else ""


class MethodNotAllowed(GatewayError):
    status = 405
    type = "invalid_request_error"
    default = "method not allowed"


class TooLarge(GatewayError):
    status = 413
    type = "request_too_large"
    default = "request exceeds the maximum size"


class UnsupportedMedia(GatewayError):
    status = 415
    type = "invalid_request_error"
    default = "content-type: must be application/json"


class HeadTooLarge(GatewayError):
    status = 431
    type = "invalid_request_error"
    default = "the request's headers are too many or too long"


class RequestTimeout(GatewayError):
    """The connection is closed: the rest of this request could be read as the next one."""

    status = 408
    type = "invalid_request_error"
    default = "the request did not arrive in time"


class HeadTimeout(RequestTimeout):
    default = "the request's headers did not arrive in time"


class BodyTimeout(RequestTimeout):
    default = "the request's body did not arrive in time"


class RateLimited(GatewayError):
    """`retry_after` is in whole seconds, None where it is not known."""

    status = 429
    type = "rate_limit_error"
    default = "the workspace's limit is reached"

    def __init__(
        self, what: str | None = None, limit: int | None = None, retry_after: int | None = None
    ) -> None:
        """`what` is limited to `limit`, such as "requests per minute"."""
        super().__init__(
            None
            if what is None
            else f"this request would exceed the workspace's limit of {limit} {what}"
        )
        self.what = what
        self.retry_after = retry_after


class TooManyUnknownKeys(RateLimited):
    def __init__(self, retry_after: int) -> None:
        GatewayError.__init__(self, "too many unknown API keys come from this address")
        self.retry_after = retry_after


class ClientGone(GatewayError):
    status = 499
    default = "client closed the connection"


class EngineFailed(GatewayError):
    default = "the engine failed"


class EngineRefusesSecret(EngineFailed):
    """`told_operator` is for the log and `/readyz`. A client gets the default."""

    told_operator = "it refuses HOLDFAST_ENGINE_SECRET, which must equal its ENGINE_SECRET"


class EngineLost(GatewayError):
    default = "the connection to the engine was lost"


class JournalUnavailable(GatewayError):
    default = "the turn could not be recorded"


class LedgerRefused(GatewayError):
    default = "the database refused a value"


class EngineTimeout(GatewayError):
    status = 504
    type = "timeout_error"
    default = "the engine did not answer in time"


class Overloaded(GatewayError):
    """`retry_after` is in whole seconds. It is a guess where the wait is not known."""

    status = 529
    type = "overloaded_error"
    default = "Overloaded"

    def __init__(self, message: str | None = None, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoEngineReady(Overloaded):
    default = "no engine is ready for this model"


class NotServed(Overloaded):
    """No engine took the turn in time, or its engine was lost before a byte had gone out."""

    default = "the connection to the engine was lost before the answer began"


class JournalFull(Overloaded):
    default = "there is no room to record another turn"


class LedgerUnavailable(Overloaded):
    default = "the database is not available"


class LedgerNotMigrated(LedgerUnavailable):
    default = (
        "the database lacks tables or columns of this version: run `python -m gateway migrate`"
        " with the settings of `serve`"
    )


class LedgerDamaged(LedgerUnavailable):
    default = (
        "the ledger's file is damaged: stop the gateway, restore a backup or recover the file with"
        " `sqlite3 ledger.db .recover`, and start it again; turns wait in the journal"
    )


class LedgerReplaced(LedgerUnavailable):
    default = (
        "the ledger is another database than the one this gateway began with: put the first one"
        " back, or start the gateway again to go on with this one; turns wait in the journal"
    )
