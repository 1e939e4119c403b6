"""What each of several workers may hold of what the settings say of the gateway."""

from pathlib import Path

from gateway.http.admitted import MAX_CONNECTIONS
from gateway.http.share import share_of
from tests.gateway.serving import make_settings

DIVIDED = (
    "bodies_bytes",
    "large_body_bytes_per_minute",
    "connections_per_address",
    "key_lookups_per_minute",
    "routing_index_bytes",
    "journal_max_bytes",
)


def test_the_workers_together_hold_what_the_settings_say(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, "http://127.0.0.1:1", connections=100)
    share = share_of(settings, 4)
    for name in (*DIVIDED, "connections"):
        assert 4 * getattr(share, name) == getattr(settings, name), name
    changed = {*DIVIDED, "connections"}
    kept = settings.model_dump(exclude=changed)
    assert share.model_dump(exclude=changed) == kept


def test_connections_that_are_not_set_are_divided_too(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, "http://127.0.0.1:1")
    assert share_of(settings, 2).connections == MAX_CONNECTIONS // 2


def test_a_share_takes_the_longest_body_and_is_never_nothing(tmp_path: Path) -> None:
    settings = make_settings(
        tmp_path, "http://127.0.0.1:1", connections=1, connections_per_address=1
    )
    share = share_of(settings, 64)
    assert share.bodies_bytes == share.large_body_bytes_per_minute == settings.body_limit_bytes
    assert share.connections == share.connections_per_address == 1
