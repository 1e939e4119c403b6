"""A run of the fuzz for every commit; `scripts/fuzz_accounting` is the long one."""

from pathlib import Path

from tests.fuzz.houses import by_gateway, by_protocol
from tests.fuzz.play import Player
from tests.fuzz.servers import Server

FIRST_SEED = 100_000
EXERCISED = (
    "full hits",
    "partial hits",
    "cross-TTL matches",
    "best-effort entries",
    "forks",
    "overlaps",
    "cancelled before the first event",
    "miss: ttl_expired",
    "miss: in_progress_race",
    "mark: cold",
    "mark: grew",
    "mark: ttl_expired",
    "mark: in_progress_race",
    "mark: below_minimum",
)


def play(server: Server, sequences: int) -> Player:
    player = Player(server)
    for number in range(sequences):
        player.play(FIRST_SEED + number)
    assert not player.differences, player.differences[:10]
    return player


def test_native_engines_count_as_the_contract_says(tmp_path: Path) -> None:
    with by_protocol(tmp_path) as server:
        tally = play(server, 20).tally
    assert [what for what in EXERCISED if not tally[what]] == []


def test_the_messages_api_counts_compressed_prefixes_as_the_contract_says(tmp_path: Path) -> None:
    """Exact and compressed turns and some with documents, of the same conversations: no kind reads
    what another wrote."""
    with by_gateway(tmp_path, has_kinds=True) as server:
        tally = play(server, 12).tally
    assert tally["compressed"] > 5 and tally["compressed hits"] and tally["exact hits"]
    assert tally["documents"] > 5 and tally["document hits"]


def test_the_messages_api_counts_as_the_contract_says(tmp_path: Path) -> None:
    with by_gateway(tmp_path) as server:
        tally = play(server, 4).tally
    assert tally["full hits"] and tally["refused"]
