"""A worker's share of the bounds that a gateway has in all.

Each worker holds its own part of these bounds, so together they keep what the settings say of the
gateway. Limits of workspaces are not divided: the parent counts them (`limits/desk.py`).
"""

from gateway.base.settings import JOURNAL_MIN_BYTES, Settings
from gateway.http.admitted import MAX_CONNECTIONS


def share_of(settings: Settings, num_workers: int) -> Settings:
    """The settings of one of `num_workers` workers.

    A share of bytes never gets smaller than the longest body, which one worker takes alone.
    """
    longest = settings.body_limit_bytes
    shares = {
        "bodies_bytes": max(settings.bodies_bytes // num_workers, longest),
        "large_body_bytes_per_minute": max(
            settings.large_body_bytes_per_minute // num_workers, longest
        ),
        "connections": (settings.connections or MAX_CONNECTIONS) // num_workers,
        "connections_per_address": settings.connections_per_address // num_workers,
        "key_lookups_per_minute": settings.key_lookups_per_minute // num_workers,
        "routing_index_bytes": settings.routing_index_bytes // num_workers,
        "journal_max_bytes": max(settings.journal_max_bytes // num_workers, JOURNAL_MIN_BYTES),
    }
    return settings.model_copy(update={name: max(value, 1) for name, value in shares.items()})
