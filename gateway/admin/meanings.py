"""What each number of the admin API is. Dashboards and documentation show these definitions."""

import re

from engine.protocol import TTLS, WRITE_FIELDS
from gateway.admin.structs.fleet import Definition

_WRITES = " + ".join(name.removesuffix("_tokens") for name in WRITE_FIELDS.values())
_PROMPT = f"input + cache_read + {_WRITES}"
# Name, title, unit, and how it is computed from fields of the engines or, further down, the ledger.
_TABLE = f"""
leases | Leases | entries | entries whose KV blocks are held until their TTL is over
leases_kept | Leases kept | share of leases that ended | expired / (expired + sacrificed + yielded +
    dropped + damaged) leases of the engines that answer, since they started
leased_tokens | Tokens held | tokens | tokens of leased entries; what several share counts once
ttl_left | Ends next | seconds | the shortest time that a lease has left, unless it is read again
lease_saved_nano | Net of what is held | dollars | net saved by these prefixes over their whole life
    in the ledger, on all engines
pool_in_use | Pool in use | share of blocks | (active + leased) blocks / all blocks of the pool;
    other clients of the engine's own server (foreign traffic) have a part of the active ones, which
    is no part of any promise
pool_leased | Leased | share of blocks | blocks held by leases alone / all blocks
pool_best_effort | Best effort | share of blocks | blocks of live entries that nothing holds / all
    blocks; an entry stays readable while they happen to be in memory
pool_automatic | Automatic | share of blocks | blocks with content of no live entry, which are
    reused where a prompt begins alike / all blocks
pool_free | Free | share of blocks | blocks with nothing of use / all blocks
holders | Who fills it | blocks of the device | each block counts once: for the shortest entry that
    it belongs to, leased ones before others, else for its workspace alone
unused_tokens | Unused room | share of referenced room | tokens that would fit into referenced
    blocks and are not there / (referenced blocks x tokens of a block)
copied_blocks | Copies on write | blocks since the engine started | shared blocks that were copied
    before somebody wrote into them
evicted_blocks | Evicted blocks | blocks since the engine started | unreferenced blocks whose
    content made way for other content
endings | How entries ended | entries since the engine started | leases that expired, were
    sacrificed, yielded to another workspace, were dropped by hand or damaged on disk; and
    best-effort entries that lost a block for room
entry_lifetimes | How long entries rest | entries since the engine started | time from one use of an
    entry to the next; time since its last use when it was evicted
host_blocks | Host tier | blocks | blocks of the host tier with content / all
store_bytes | Store on disk | bytes, blocks, entries | what files of blocks take, of at most;
    entries and leases that outlive a restart; files and journal lines that were not what they must
    be (damaged), each a miss
sampled_first_token | Time to first token | seconds | of the newest turns of each of 40 equal parts
    of the range, from arrival to first token
overhead_seconds | Gateway overhead | seconds | time to first token - queue - prefill, both as the
    engine tells; of the sampled turns
kv_over_time | KV memory in use over time | share of blocks | (active + leased) blocks / all
    blocks, and leased / all, on average over the looks that this gateway takes each second
queue_over_time | Waiting over time | requests | the most in any minute: those that wait at engines
    for blocks, and turns that wait at this gateway for an engine with room
attribution | Where hits are lost | share of prompt tokens | of sampled turns: tokens that some
    engine held (available), that the chosen one held (captured), that were reused (delivered); what
    was reused counts as held
restart_lost | Written again | tokens | cache_write tokens of turns that missed because their engine
    had restarted
token_hit_rate | Token hit rate | share of prompt tokens | cache_read / ({_PROMPT}) tokens
cacheable_hit_rate | Cacheable hit rate | share of marked tokens | cache_read / (cache_read +
    {_WRITES}) tokens
request_hit_rate | Request hit rate | share of requests | requests with a read / requests
requests | Requests | turns | turns that began in the range, failed ones included
errors | Failed | turns | turns whose outcome is an error
prompt_tokens | Prompt tokens | tokens | {_PROMPT}
input_tokens | Neither read nor written | tokens | prompt tokens at the input price, reused
    automatically or computed
automatic_input_tokens | Reused automatically | tokens | prompt tokens neither read nor written that
    were in memory all the same: max(automatic - written, 0) of each turn
cache_read_tokens | Read from cache | tokens | prompt tokens whose KV was reused from a marked
    prefix
output_tokens | Output | tokens | tokens generated; no part of any hit rate
automatic_tokens | Reused beyond the read | tokens | reused from memory beyond the read, billed as
    input or write
saved_nano | Net saved | dollars | cost of the same tokens without a cache - cost, in nano-dollars,
    write premium included; negative while writes have not been read
unpriced | Without a price | turns | requests whose model has no price: they are in the tokens, not
    in the money
counterfactual_nano | Without a cache | dollars | ({_PROMPT}) tokens x input price + output
write_premium_nano | Write premium | dollars | tokens written x (write price - input price)
read_discount_nano | Read discount | dollars | tokens read x (input price - read price)
actual_nano | Actual cost | dollars | without a cache + write premium - read discount
hosted | At published prices | dollars | the cost of the same tokens at a published price, for
    comparison; no cost of anybody here
prefill_tokens_avoided | Prefill avoided | tokens | cache_read tokens
prefill_seconds_avoided | Prefill time avoided | seconds | for each engine and model: cache_read
    tokens / (computed tokens / prefill seconds of its turns whose prefill was timed); unknown where
    none was
gpu_hours_avoided | GPU hours avoided | hours | prefill_seconds_avoided / 3600, an engine counted as
    one GPU
compared_first_token | First token, read or not | seconds | medians of turns with and without a
    read, of the one prompt length that most of both had
first_token_seconds | Time to first token | seconds | percentiles of a histogram, each known to
    within 1 % of itself
better_ttl | Cheaper TTL | 5m or 1h | the cheaper of 5m: write_5m x turns that came over 5 minutes
    after the one before + read x the others, and 1h: the same with an hour and write_1h
reads_per_write | Reads per write | tokens | tokens read for each token written: cache_read / (
    {_WRITES})
reads_to_pay_back | Pays back after | reads | the fewest reads of all marked tokens whose discount
    exceeds the premium of one write
first_difference | First difference | section, block, characters of its text that are alike at least
    | the first place where the names of both prompts' prefixes differ
shared_tokens | Begin alike | tokens | of the earlier prompt, up to the last prefix that both have;
    estimated by bytes
workspaces | Workspaces | workspaces | those that are not archived
active_workspaces | With traffic | workspaces | those that had a turn in the range
month_cost | This month | dollars | cost of the turns since the first of the calendar month (UTC),
    those without a price 0
missed_tokens | Behind the difference | tokens | of the earlier prompt, from the first
    difference on; estimated by bytes
missed_nano | Cost of the miss | dollars | missed_tokens x (input price - read price), at most those
    of this prompt
"""


def _definitions() -> dict[str, Definition]:
    found = {}
    for row in re.split(r"\n(?! )", _TABLE.strip()):
        name, title, unit, formula = " ".join(row.split()).split(" | ")
        found[name] = Definition(title=title, unit=unit, formula=formula)
    for ttl, name in WRITE_FIELDS.items():
        words = TTLS[ttl].words
        formula = f"prompt tokens written to entries with a TTL of {words}"
        found[name] = Definition(title=f"Written, {words}", unit="tokens", formula=formula)
    return found


DEFINITIONS = _definitions()
