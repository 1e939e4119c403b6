"""The newest error answers, as they are kept and found."""

from gateway.admin.structs.usage import Refusal
from gateway.http.errors import MAX_OF_WORKSPACE, MAX_WORKSPACES, Refusals


def refusal(at_ms: int, workspace: str | None) -> Refusal:
    return Refusal(
        at_ms=at_ms,
        request_id=f"req_{at_ms}",
        workspace=workspace,
        status=400,
        type="invalid_request_error",
        message="no",
        path="/v1/messages",
        user_agent=None,
    )


def test_one_that_is_refused_all_day_hides_nobody_else() -> None:
    kept = Refusals()
    kept.keep(refusal(0, "quiet"))
    for at_ms in range(1, 2 * MAX_OF_WORKSPACE):
        kept.keep(refusal(at_ms, "loud"))
    assert len(kept.newest("loud", None, 1000)) == MAX_OF_WORKSPACE
    assert [one.at_ms for one in kept.newest("quiet", None, 10)] == [0]


def test_workspaces_are_bounded() -> None:
    kept = Refusals()
    for number in range(MAX_WORKSPACES + 5):
        kept.keep(refusal(number, f"workspace-{number}"))
    assert len(kept.newest(None, None, 10_000)) == MAX_WORKSPACES
    assert kept.newest("workspace-0", None, 10) == []
