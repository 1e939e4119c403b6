"""What leases may hold of a vLLM that others use too, where its operator says nothing."""

from collections.abc import Mapping
from typing import Any

DEFAULTS = {"lease_share": 0.25, "scope_lease_share": 0.5}
"""`lease_share` of the pool's blocks for all leases, `scope_lease_share` of those for one scope."""


def lease_shares(extra: Mapping[str, Any]) -> dict[str, float]:
    """From `kv_connector_extra_config`. Raises ValueError for one that is not from 0 to 1."""
    shares = {name: float(extra.get(name, default)) for name, default in DEFAULTS.items()}
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be between 0 and 1")
    return shares
