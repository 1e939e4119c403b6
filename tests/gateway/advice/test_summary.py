"""Which lines a summary has, and their order."""

from gateway.advice.summary import MAX_LINES, Spent, summary_lines


def spent(number: int, **changes: int | None) -> Spent:
    values: dict[str, int | None] = {
        "num_turns": 40,
        "read": 0,
        "written": 1000 * (number + 1),
        "write_premium": 250 * (number + 1),
        "prompt_tokens": 10_000,
        "saved_nano": -1,
    }
    return Spent(workspace=f"w{number}", **(values | changes))  # type: ignore[arg-type]


def test_the_dearest_lines_stay_and_the_others_are_counted() -> None:
    lines, num_more = summary_lines([], [], [spent(number) for number in range(5)])
    assert [line.workspace for line in lines] == ["w4", "w3"] and num_more == 3
    assert len(lines) <= MAX_LINES


def test_a_workspace_with_few_requests_or_a_gain_or_hardly_a_loss_gives_no_line() -> None:
    sound = [
        spent(0, num_turns=19),
        spent(1, read=10_000),
        spent(2, saved_nano=1),
        spent(3, prompt_tokens=1_000_000),
    ]
    assert summary_lines([], [], sound) == ([], 0)
    ((line,), _) = summary_lines([], [], [spent(0, saved_nano=None)])
    assert line.nano is None and line.multiples == 250
