"""Which lines a summary has, and their order."""

from gateway.advice.summary import MAX_LINES, KnownPrefix, Spent, summary_lines


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


def known(workspace: str, ttl: str, num_turns: int = 20) -> KnownPrefix:
    return KnownPrefix(
        workspace=workspace,
        better_ttl="1h" if ttl == "1h" else "5m",
        saves_nano=7000,
        saves_multiples=7.0,
        num_turns=num_turns,
        last_turn=f"msg_{workspace}",
    )


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


def test_prefixes_are_counted_by_the_ttl_that_is_cheaper() -> None:
    lines, _ = summary_lines([], [known("a", "1h"), known("b", "1h"), known("a", "5m")], [])
    by = {line.workspace: line for line in lines}
    assert by[None].text.startswith("2 prefixes would have been cheaper with a 1-hour TTL, by 14")
    assert (by[None].nano, by[None].num_turns, by[None].turns) == (14_000, 40, ["msg_a", "msg_b"])
    assert by["a"].text.startswith("1 prefix would have been cheaper with a 5-minute TTL")
    assert summary_lines([], [known("a", "1h", num_turns=19)], []) == ([], 0)
