"""Every way a request to the gateway can fail. The message is for the client, in the wire's words.

`status` and `type` are those of the Messages API; `dialects/errors.py` has the other dialects'.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

_PLURAL = re.compile(r"\b(request|token|byte|call|content)s\b")


class GatewayError(Exception):
    """A subclass has its parent's status, type and default message where it names none."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "api_error"
    default: ClassVar[str] = "internal server error"

    def __init_subclass__(cls, **options: int | str) -> None:
        for name, value in options.items():
            setattr(cls, name, value)

    def __init__(self, message: str | None = None, param: str | None = None) -> None:
        """`param` is the wrong field's path, if the message does not begin with it. `is_recorded`
        says that the error ended a turn whose row in the ledger tells of it."""
        super().__init__(message or self.default)
        self.param = param
        self.is_recorded = False


class InvalidRequest(
    GatewayError, status=400, type="invalid_request_error", default="invalid request"
): ...


class PromptTooLong(InvalidRequest, default="prompt is too long"):
    """Both counts are None where the engine did not tell them."""

    def __init__(self, num_tokens: int | None = None, max_tokens: int | None = None) -> None:
        has_counts = num_tokens is not None and max_tokens is not None
        detail = f": {num_tokens} tokens > {max_tokens} maximum" if has_counts else ""
        super().__init__(f"{self.default}{detail}")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


def why_not_kept(keeps: bool) -> str:
    """Why nothing is kept under an id. `keeps` says whether responses of its workspace are kept at
    all."""
    if keeps:
        return "it was deleted, its time is over, or it had `store` set to false."
    return (
        "this gateway keeps none, until its operator sets HOLDFAST_RESPONSE_DAYS, or"
        " `keep_days` of this workspace."
    )


class ResponseNotKept(InvalidRequest):
    """A request names an earlier response, or interaction, that is not kept. `keeps` is as in
    `why_not_kept`."""

    def __init__(self, response_id: str, *, keeps: bool, kind: str = "response") -> None:
        cause = why_not_kept(keeps)
        super().__init__(
            f"Previous {kind} with id '{response_id}' not found: {cause} Send the whole"
            " conversation as `input`, as clients do with `store` set to false.",
            f"previous_{kind}_id",
        )


class ThreadNotFound(
    InvalidRequest,
    default="thread.previous_message_id: no such thread; send the whole conversation",
):
    """No conversation is kept. A client that gets this sends the whole one."""

    code = "thread_not_found"


class DemandRefused(InvalidRequest):
    """A tool or a schema that output can't be held to, or an image or a part of a prefix that an
    engine can't take. The message begins with the engine protocol's field (`output_schema`,
    `tools[0].input_schema`), which each dialect renames."""


class SchemaTooCostly(DemandRefused):
    """Holding an answer that had begun to its schemas took too much time or memory."""


class Unauthenticated(
    GatewayError, status=401, type="authentication_error", default="invalid x-api-key"
): ...


class MissingKey(Unauthenticated, default="x-api-key header is required"): ...


class AdminKeyServesNoTurns(
    Unauthenticated,
    default="this is the admin key, which has no workspace and serves no turns: make an API key on "
    "the dashboard's page Workspaces, or by POST /admin/v1/keys",
): ...


class SpendLimitReached(
    GatewayError,
    status=402,
    type="billing_error",
    default="the workspace has reached its spend limit for this month",
): ...


class Forbidden(GatewayError, status=403, type="permission_error", default="not permitted"): ...


class SampleData(Forbidden, default="this gateway shows sample data and serves no turns"):
    """The database holds sample data. It takes no real rows, and no turn is served on it."""


class NotFound(GatewayError, status=404, type="not_found_error", default="not found"): ...


class ModelNotFound(NotFound):
    """A model id that nothing serves. `served` are ids that clients may ask for."""

    def __init__(self, requested: str, served: Sequence[str]) -> None:
        self.requested = requested[:128]
        self.served = [model[:128] for model in served[:5]]
        super().__init__(f"model: {self.requested}{self.told('; ')}")

    def told(self, before: str) -> str:
        """Which ids are served, for the end of a message; empty where there are none."""
        return f"{before}served here: {', '.join(self.served)}" if self.served else ""


class MethodNotAllowed(
    GatewayError, status=405, type="invalid_request_error", default="method not allowed"
): ...


class UpgradeRefused(
    GatewayError,
    status=426,
    type="invalid_request_error",
    default="no WebSockets are spoken here: send POST /v1/responses over HTTP",
):
    """A WebSocket was asked for. Codex goes on over HTTP at this status alone, and tries again at
    all others (openai/codex#10824)."""


class TooLarge(
    GatewayError, status=413, type="request_too_large", default="request exceeds the maximum size"
): ...


class UnsupportedMedia(
    GatewayError,
    status=415,
    type="invalid_request_error",
    default="content-type: must be application/json",
): ...


class HeadTooLarge(
    GatewayError,
    status=431,
    type="invalid_request_error",
    default="the request's headers are too many or too long",
): ...


class RequestTimeout(
    GatewayError,
    status=408,
    type="invalid_request_error",
    default="the request did not arrive in time",
):
    """The connection is closed: the rest of this request could be read as the next one."""


class HeadTimeout(RequestTimeout, default="the request's headers did not arrive in time"): ...


class BodyTimeout(RequestTimeout, default="the request's body did not arrive in time"): ...


class RateLimited(
    GatewayError, status=429, type="rate_limit_error", default="the workspace's limit is reached"
):
    """`retry_after` is in whole seconds, None where it is not known."""

    def __init__(
        self,
        what: str | None = None,
        limit: int = 0,
        retry_after: int | None = None,
        message: str | None = None,
    ) -> None:
        """`what` is limited to `limit`, such as "requests per minute"; or the whole `message`."""
        if what is not None:
            unit = _PLURAL.sub(r"\1", what, count=1) if limit == 1 else what
            message = f"this request would exceed the workspace's limit of {limit} {unit}"
        super().__init__(message)
        self.what = what
        self.retry_after = retry_after


class ClientGone(GatewayError, status=499, default="client closed the connection"): ...


class EngineFailed(GatewayError, default="the engine failed"): ...


class EngineSetWrong(EngineFailed):
    """`told_operator` is for the log and `/readyz`. A client gets the default."""

    told_operator: ClassVar[str]


class EngineRefusesSecret(EngineSetWrong):
    told_operator = "it refuses HOLDFAST_ENGINE_SECRET, which must equal its ENGINE_SECRET"


class NoEngineThere(EngineSetWrong):
    """A server answers there with 404, as a vLLM into which the plugin was not loaded does."""

    told_operator = (
        "no Holdfast engine answers there (404): a vLLM's URL ends with /holdfast, and "
        "VLLM_PLUGINS must name holdfast where vLLM is started"
    )


class AnotherModel(EngineFailed):
    """An engine's model has the name of another one. The message is for operators."""


class EngineLost(GatewayError, default="the connection to the engine was lost"): ...


class JournalUnavailable(GatewayError, default="the turn could not be recorded"): ...


class LedgerRefused(GatewayError, default="the database refused a value"): ...


class EngineTimeout(
    GatewayError, status=504, type="timeout_error", default="the engine did not answer in time"
): ...


class Overloaded(GatewayError, status=529, type="overloaded_error", default="Overloaded"):
    """`retry_after` is in whole seconds. It is a guess where the wait is not known."""

    def __init__(self, message: str | None = None, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PutOff(Overloaded):
    """The engine takes others' turns, and this one later."""


class NoEngineReady(Overloaded, default="no engine is ready for this model"): ...


class StillMeasuring(Overloaded):
    """An engine does not know yet whether it may answer approximately as it is asked to."""


class NotServed(
    Overloaded, default="the connection to the engine was lost before the answer began"
):
    """No engine took the turn in time, or its engine was lost before a byte had gone out."""


class AnswerAborted(Overloaded, default="the engine aborted the answer before it was whole"):
    """The engine works, and gave up an answer that it had begun: the server in it was paused."""


class GatewayStopped(Overloaded, default="the gateway stopped before the answer was whole"):
    """It was told to stop, and its grace is over."""

    def __init__(self) -> None:
        super().__init__(retry_after=1)


class JournalFull(Overloaded, default="there is no room to record another turn"): ...


class LedgerUnavailable(Overloaded, default="the database is not available"): ...


class LedgerNotMigrated(
    LedgerUnavailable,
    default="the database lacks tables or columns of this version: run `python -m gateway migrate`"
    " with the settings of `serve`",
): ...


class SchemaRefused(GatewayError, default="this version can't upgrade the database"): ...


class LedgerDamaged(
    LedgerUnavailable,
    default="the ledger's file is damaged: stop the gateway, restore a backup or recover the file"
    " with `sqlite3 ledger.db .recover`, and start it again; turns wait in the journal",
): ...


class LedgerReplaced(
    LedgerUnavailable,
    default="the ledger is another database than the one this gateway began with: put the first one"
    " back, or start the gateway again to go on with this one; turns wait in the journal",
): ...
