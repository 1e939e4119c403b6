"""What each number of the admin API is. Dashboards and documentation show these definitions."""

from gateway.admin.structs.fleet import Definition


def _of(title: str, unit: str, formula: str) -> Definition:
    return Definition(title=title, unit=unit, formula=formula)


# What turns used, cost and saved, from the ledger.
_OF_TURNS: dict[str, Definition] = {
    "token_hit_rate": _of(
        "Token hit rate",
        "share of prompt tokens",
        "cache_read / (input + cache_read + cache_write_5m + cache_write_1h) tokens",
    ),
    "cacheable_hit_rate": _of(
        "Cacheable hit rate",
        "share of marked tokens",
        "cache_read / (cache_read + cache_write_5m + cache_write_1h) tokens",
    ),
    "request_hit_rate": _of(
        "Request hit rate", "share of requests", "requests with a read / requests"
    ),
    "requests": _of("Requests", "turns", "turns that began in the range, failed ones included"),
    "errors": _of("Failed", "turns", "turns whose outcome is an error"),
    "prompt_tokens": _of(
        "Prompt tokens", "tokens", "input + cache_read + cache_write_5m + cache_write_1h"
    ),
    "input_tokens": _of(
        "Uncached",
        "tokens",
        "prompt tokens neither read nor written; in charts without the automatically reused ones",
    ),
    "automatic_input_tokens": _of(
        "Automatically reused",
        "tokens",
        "uncached prompt tokens that were in memory all the same: max(automatic - written, 0) of"
        " each turn",
    ),
    "cache_read_tokens": _of(
        "Read from cache", "tokens", "prompt tokens whose KV was reused from a marked prefix"
    ),
    "cache_write_5m_tokens": _of(
        "Written, 5 minutes", "tokens", "prompt tokens written to entries with a TTL of 5 minutes"
    ),
    "cache_write_1h_tokens": _of(
        "Written, 1 hour", "tokens", "prompt tokens written to entries with a TTL of 1 hour"
    ),
    "output_tokens": _of("Output", "tokens", "tokens generated; no part of any hit rate"),
    "automatic_tokens": _of(
        "Reused unmarked", "tokens", "reused from memory beyond the read, billed as input or write"
    ),
    "saved_nano": _of(
        "Net saved",
        "dollars",
        "cost of the same tokens without a cache - cost, in nano-dollars, write premium"
        " included; negative while writes have not been read",
    ),
    "unpriced": _of(
        "Without a price",
        "turns",
        "requests whose model has no price: they are in the tokens, not in the money",
    ),
    "counterfactual_nano": _of(
        "Without a cache",
        "dollars",
        "(input + cache_read + cache_write_5m + cache_write_1h) tokens x input price + output",
    ),
    "write_premium_nano": _of(
        "Write premium", "dollars", "tokens written x (write price - input price)"
    ),
    "read_discount_nano": _of(
        "Read discount", "dollars", "tokens read x (input price - read price)"
    ),
    "actual_nano": _of("Actual cost", "dollars", "without a cache + write premium - read discount"),
    "hosted": _of(
        "At published prices",
        "dollars",
        "the cost of the same tokens at a published price, for comparison; no cost of anybody here",
    ),
    "prefill_tokens_avoided": _of("Prefill avoided", "tokens", "cache_read tokens"),
    "prefill_seconds_avoided": _of(
        "Prefill time avoided",
        "seconds",
        "for each engine and model: cache_read tokens / (computed tokens /"
        " prefill seconds of its turns whose prefill was timed); unknown where none was",
    ),
    "gpu_hours_avoided": _of(
        "GPU hours avoided",
        "hours",
        "prefill_seconds_avoided / 3600, an engine counted as one GPU",
    ),
    "compared_first_token": _of(
        "First token, cached or not",
        "seconds",
        "medians of turns with and without a read, of the one prompt length that most of both had",
    ),
    "first_token_seconds": _of(
        "Time to first token",
        "seconds",
        "percentiles of a histogram, each known to within 19 % of itself",
    ),
    "better_ttl": _of(
        "Cheaper TTL",
        "5m or 1h",
        "the cheaper of 5m: write_5m x turns that came over 5 minutes after the one"
        " before + read x the others, and 1h: the same with an hour and write_1h",
    ),
    "reads_to_pay_back": _of(
        "Pays back after",
        "reads",
        "the fewest reads of all marked tokens whose discount exceeds the premium of one write",
    ),
    "first_difference": _of(
        "First difference",
        "section, block, characters of its text that are alike at least",
        "the first place where the names of both prompts' prefixes differ",
    ),
    "shared_tokens": _of(
        "Begin alike",
        "tokens",
        "of the earlier prompt, up to the last prefix that both have; estimated by bytes",
    ),
    "workspaces": _of("Workspaces", "workspaces", "those that are not archived"),
    "active_workspaces": _of("With traffic", "workspaces", "those that had a turn in the range"),
    "month_cost": _of(
        "This month",
        "dollars",
        "cost of the turns since the first of the calendar month (UTC), those without a price 0",
    ),
    "missed_tokens": _of(
        "Tokens behind the difference",
        "tokens",
        "of the earlier prompt, from the first difference on; estimated by bytes",
    ),
    "missed_nano": _of(
        "Cost of the miss",
        "dollars",
        "missed_tokens x (input price - read price), at most those of this prompt",
    ),
}

# What engines hold and did, as they tell it now.
_OF_ENGINES: dict[str, Definition] = {
    "leases": _of("Leases", "entries", "entries whose KV blocks are held until their TTL is over"),
    "leases_kept": _of(
        "Leases kept",
        "share of leases that ended",
        "expired / (expired + sacrificed + yielded + dropped + damaged) leases of the engines that"
        " answer, since they started",
    ),
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
        "Pool in use",
        "share of blocks",
        "(active + leased) blocks / all blocks of the pool; other clients of the engine's own"
        " server (foreign traffic) have a part of the active ones, which is no part of any promise",
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
        "leases that expired, were sacrificed, yielded to another workspace, were dropped by hand"
        " or damaged on disk; and best-effort entries that lost a block for room",
    ),
    "entry_lifetimes": _of(
        "How long entries rest",
        "entries since the engine started",
        "time from one use of an entry to the next; time since its last use when it was evicted",
    ),
    "host_blocks": _of("Host tier", "blocks", "blocks of the host tier with content / all"),
    "store_bytes": _of(
        "Store on disk",
        "bytes, blocks, entries",
        "what files of blocks take, of at most; entries and leases that outlive a restart; files"
        " and journal lines that were not what they must be (damaged), each a miss",
    ),
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
        " (captured), that were reused (delivered); what was reused counts as held",
    ),
    "restart_lost": _of(
        "Written again",
        "tokens",
        "cache_write tokens of turns that missed because their engine had restarted",
    ),
}

DEFINITIONS: dict[str, Definition] = {**_OF_ENGINES, **_OF_TURNS}
