"""The operations on what engines hold now, and on how they fared."""

from gateway.admin.leases import Dropped, Lease
from gateway.admin.live import EngineMemory, FleetHistory, LatencySamples
from gateway.admin.operation import ADMIN_KEYS, READING, Operation, path, query
from gateway.admin.usage_operations import FILTERED, text

_LEASES = "/admin/v1/leases"

LIVE_OPERATIONS = (
    Operation(
        id="getMemory",
        method="get",
        path="/admin/v1/engines/memory",
        summary="What is in each engine's memory.",
        replies=(list[EngineMemory],),
        security=ADMIN_KEYS,
        parameters=(text("engine", 64, 1),),
        errors=READING,
    ),
    Operation(
        id="getFleetHistory",
        method="get",
        path="/admin/v1/engines/history",
        summary="Restarts in a range, and where hits were lost.",
        replies=(FleetHistory,),
        security=ADMIN_KEYS,
        parameters=tuple(each for each in FILTERED if each["name"] != "workspace"),
        errors=READING,
    ),
    Operation(
        id="getLatencySamples",
        method="get",
        path="/admin/v1/latency/samples",
        summary="A bounded sample of turns: time to first token against prompt length.",
        replies=(LatencySamples,),
        security=ADMIN_KEYS,
        parameters=(
            *FILTERED,
            query("limit", {"type": "integer", "minimum": 40, "maximum": 4000, "default": 1600}),
        ),
        errors=READING,
    ),
    Operation(
        id="listLeases",
        method="get",
        path=_LEASES,
        summary="Live entries of all engines.",
        replies=(list[Lease],),
        security=ADMIN_KEYS,
        parameters=(
            text("workspace", 64, 1),
            text("engine", 64, 1),
            query("limit", {"type": "integer", "minimum": 1, "maximum": 2000, "default": 2000}),
        ),
        errors=READING,
    ),
    Operation(
        id="dropLease",
        method="delete",
        path=f"{_LEASES}/{{entry}}",
        summary="End one entry of a workspace on an engine.",
        replies=(Dropped,),
        security=ADMIN_KEYS,
        parameters=(
            path("entry"),
            text("workspace", 64, 1, required=True),
            text("engine", 64, 1, required=True),
        ),
        errors=READING,
    ),
)
