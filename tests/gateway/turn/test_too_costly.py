"""A request that takes an engine too long to prepare is sent to no second one."""

from engine.protocol import STATUS_OF, ErrorReply
from gateway.base.errors import InvalidRequest
from gateway.routing.engine import refusal
from gateway.turn.attempts import is_retried


def test_what_is_too_costly_is_the_clients_mistake_and_is_not_retried() -> None:
    error = refusal(ErrorReply("too_costly", "takes too much to prepare: more than 8 seconds"))
    assert isinstance(error, InvalidRequest) and not is_retried(error)
    assert error.status == STATUS_OF["too_costly"] == 400
    assert "take too long to prepare" in str(error)
