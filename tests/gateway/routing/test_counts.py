"""Counts that no turn can have stop neither the drain nor the reconciliation of others."""

import httpx

from engine.protocol import Done, FinalCounts, Finished, Frame, GenerateRequest, InputUsage
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import say
from tests.gateway.serving import eventually


def test_a_count_that_is_not_sane_ends_its_turn_and_no_other(stack: Stack) -> None:
    engine = stack.engine
    with stack.http() as http:
        for number, count in enumerate((2**63, 2**31, -1)):

            def mad(
                request: GenerateRequest, _: InputUsage, count: int = count
            ) -> list[Frame | float | bytes]:
                finished = Finished(reason="stop", output_tokens=count)
                return [finished, Done(request_id=request.request_id, output_tokens=count)]

            engine.script = mad
            assert http.post("/v1/messages", json=body()).status_code == 500
            name = f"msg_{number}"
            engine.final[name] = FinalCounts(
                request_id=name, epoch="epoch-1", reason="stop", output_tokens=count
            )
        engine.script = say("Hello")
        assert http.post("/v1/messages", json=body()).status_code == 200

    def outcomes() -> list[str]:
        return sorted(turn["outcome"] for turn in stack.admin("turns?limit=9").json())

    eventually(lambda: outcomes() == [*["api_error"] * 3, "stop"])
    assert httpx.get(f"{stack.url}/readyz", timeout=120).status_code == 200
