"""Which lines a summary has, and their order."""

from gateway.advice.summary import MAX_LINES, summary_lines
from gateway.structs.usage import Totals


def spent(number: int, **changes: int) -> dict[str, Totals]:
    """A workspace whose 40 requests wrote and hardly read."""
    values = {"requests": 40, "cache_write_5m_tokens": 1000 * (number + 1), "cost_nano": 1}
    return {f"w{number}": Totals(**{**values, **changes})}


def test_the_dearest_lines_stay_and_the_others_are_counted() -> None:
    lines, num_more = summary_lines(
        [], [], spent(0) | spent(1) | spent(2) | spent(3) | spent(4), {}
    )
    assert [line.workspace for line in lines] == ["w4", "w3"] and num_more == 3
    assert len(lines) <= MAX_LINES


def test_a_workspace_with_few_requests_or_a_gain_or_hardly_a_loss_gives_no_line() -> None:
    sound = spent(0, requests=19) | spent(1, cache_read_tokens=10_000)
    sound |= spent(2, cost_nano=-1) | spent(3, input_tokens=996_000)
    assert summary_lines([], [], sound, {}) == ([], 0)
    ((line,), _) = summary_lines([], [], spent(0, unpriced=1), {})
    assert line.nano is None and line.multiples == 250
