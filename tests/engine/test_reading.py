"""How much framing a chunked body may have beside its content."""

from hypothesis import given
from hypothesis import strategies as st

from engine.reading import FRAMING_SHARE, FREE_FRAMING_BYTES, PIECE_BYTES, Framing


def count_all(framing: Framing, chunks: list[tuple[int, int]]) -> None:
    for num_bytes, num_content in chunks:
        framing.count(num_bytes, num_content)


@given(size=st.integers(12, 100_000), num_chunks=st.integers(1, 50_000))
def test_chunks_that_carry_something_are_never_refused(size: int, num_chunks: int) -> None:
    framing = Framing()
    framing.count(num_chunks * (len(f"{size:x}") + 4 + size), num_chunks * size)
    assert not framing.is_excessive


@given(
    chunks=st.lists(
        st.integers(1, PIECE_BYTES).flatmap(
            lambda num_bytes: st.tuples(st.just(num_bytes), st.integers(0, num_bytes))
        )
    )
)
def test_framing_counts_when_content_comes_behind_it(chunks: list[tuple[int, int]]) -> None:
    framing = Framing()
    count_all(framing, chunks)
    num_content = sum(content for _, content in chunks)
    num_bytes = sum(num_bytes for num_bytes, _ in chunks)
    assert framing.num_content == num_content
    assert framing.num_framing <= num_bytes - num_content
    framing.count(2, 1)
    assert framing.num_framing == num_bytes - num_content + 1
    limit = FREE_FRAMING_BYTES + FRAMING_SHARE * (num_content + 1)
    assert framing.is_excessive == (framing.num_framing > limit)


def test_what_may_be_trailers_has_its_bound_elsewhere() -> None:
    framing = Framing()
    framing.count(10 * FREE_FRAMING_BYTES, 0)
    assert not framing.is_excessive
