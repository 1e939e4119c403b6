"""What the numbers are that tell of engines as they are now; see `definitions.py`."""

from gateway.admin.definition import Definition


def _of(title: str, unit: str, formula: str) -> Definition:
    return Definition(title=title, unit=unit, formula=formula)


LIVE_DEFINITIONS: dict[str, Definition] = {
    "leases": _of("Leases", "entries", "entries whose KV blocks are held until their TTL is over"),
    "leased_tokens": _of(
        "Tokens held", "tokens", "tokens of leased entries; what two of them share counts twice"
    ),
    "ttl_left": _of(
        "Ends next", "seconds", "the shortest time that a lease has left, unless it is read again"
    ),
    "lease_saved_nano": _of(
        "Net of what is held",
        "dollars",
        "net saved by these prefixes over their whole life in the ledger, on all engines",
    ),
    "pool_in_use": _of(
        "Pool in use", "share of blocks", "(active + leased) blocks / all blocks of the pool"
    ),
    "pool_leased": _of("Leased", "share of blocks", "blocks held by leases alone / all blocks"),
    "unused_tokens": _of(
        "Unused room",
        "share of referenced room",
        "tokens that would fit into referenced blocks and are not there / (referenced blocks x"
        " tokens of a block)",
    ),
    "copied_blocks": _of(
        "Copies on write",
        "blocks since the engine started",
        "shared blocks that were copied before somebody wrote into them",
    ),
    "evicted_blocks": _of(
        "Evicted blocks",
        "blocks since the engine started",
        "unreferenced blocks whose content made way for other content",
    ),
    "endings": _of(
        "How entries ended",
        "entries since the engine started",
        "leases that expired, were sacrificed, yielded to another workspace or dropped by hand;"
        " and best-effort entries that lost a block for room",
    ),
    "entry_lifetimes": _of(
        "How long entries rest",
        "entries since the engine started",
        "time from one use of an entry to the next; time since its last use when it was evicted",
    ),
    "host_blocks": _of("Host tier", "blocks", "blocks of the host tier with content / all"),
    "sampled_first_token": _of(
        "Time to first token",
        "seconds",
        "of the newest turns of each of 40 equal parts of the range, from arrival to first token",
    ),
    "overhead_seconds": _of(
        "Gateway overhead",
        "seconds",
        "time to first token - queue - prefill, both as the engine tells; of the sampled turns",
    ),
    "attribution": _of(
        "Where hits are lost",
        "share of prompt tokens",
        "of sampled turns: tokens that some engine held (available), that the chosen one held"
        " (captured), that were reused (delivered)",
    ),
    "restart_lost": _of(
        "Written again",
        "tokens",
        "cache_write tokens of turns that missed because their engine had restarted",
    ),
}
