"""A damaged journal: the gateway starts, and what is lost is named."""

from tests.faults.damages import run


def test_no_turn_of_a_damaged_journal_is_lost_without_a_word() -> None:
    outcomes = run(16, processes=0.125)
    assert sum(each.is_process for each in outcomes) == 2
    for each in outcomes:
        assert not (each.unnamed or each.wrong), each
