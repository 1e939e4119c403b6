from gateway.turn.ids import Ids


def test_ids_have_their_length_and_never_come_again() -> None:
    """Several pages of random bytes, whose ends no id fits into exactly."""
    ids = Ids()
    found = [ids.hex(10) for _ in range(2_000)]
    assert {len(each) for each in found} == {20}
    assert len(set(found)) == len(found)
    assert not set(found) & {Ids().hex(10) for _ in range(2_000)}
