"""The circuit breaker, on a clock of its own."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.breaker import FAILURES, FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, Breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for number in range(FAILURES):
        assert breaker.allows(now)
        breaker.failed(f"t{number}", now)
    return breaker


def test_a_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now, pause = opened(), 0.0, FIRST_PAUSE_SECONDS
    for _ in range(10):
        now += pause
        assert breaker.state(now) == "half_open"
        breaker.sent("probe", now)
        breaker.failed("probe", now)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
        assert breaker.state(now + pause - 0.001) == "open"


ACTS = st.sampled_from(["sent", "failed", "answered", "succeeded", "left", "wait"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 3)), max_size=60))
def test_whatever_happens_it_takes_turns_again(steps: list[tuple[str, int]]) -> None:
    """No order of events leaves it shut for longer than the longest pause, once turns are over."""
    breaker, now = Breaker(), 0.0
    for act, number in steps:
        turn = f"t{number}"
        if act == "wait":
            now += 1.0
        elif act == "sent":
            breaker.sent(turn, now)
        elif act == "failed":
            breaker.failed(turn, now)
        elif act == "left":
            breaker.left(turn)
        else:
            getattr(breaker, act)()
    for number in range(4):
        breaker.left(f"t{number}")
    assert breaker.allows(now + MAX_PAUSE_SECONDS)
