"""The reference model of the public prompt-caching accounting, as it was given: a vendored copy.

The differential tests compare engines with it; it shares no code with them. Token counts are per
block, `g` is the tail that is rendered after the last one.
"""

import hashlib
from dataclasses import dataclass, field

TTL = {"5m": 300, "1h": 3600}
WINDOW, MAXBP = 20, 4


@dataclass
class B:  # one block
    sec: str  # 'tools' | 'system' | 'messages'
    key: str  # content identity (byte identity of the rendered block)
    n: int  # tokens
    cc: str | None = None  # None | '5m' | '1h'
    kind: str = "text"  # text | tool_use | tool_result | thinking | empty | image ...
    msg: int = 0


class Err(Exception):
    pass


@dataclass
class Entry:
    tokens: int
    ttl: str
    ready: float
    expires: float


@dataclass
class Cache:
    min_cache_tokens: int = 1024
    store: dict = field(default_factory=dict)  # (scope, model, hash) -> Entry

    def run(
        self,
        blocks,
        auto=None,
        t=0.0,
        begin=None,
        g=0,
        scope="org/ws",
        model="m",
        p_tools="",
        p_system="",
        p_msgs="",
        ok=True,
    ):
        begin = t if begin is None else begin
        order = {"tools": 0, "system": 1, "messages": 2}
        blocks = sorted(blocks, key=lambda b: order[b.sec])  # stable
        # --- validation, in the captured order
        for b in blocks:
            if b.cc and b.kind == "thinking":
                raise Err("thinking marker")
            if b.cc and b.kind == "empty":
                raise Err("empty text marker")
        exp = [(i, b.cc) for i, b in enumerate(blocks) if b.cc]
        number = len(exp) + (auto is not None)
        if number > MAXBP:
            raise Err(f"count {number}")
        seen5 = False
        for i, ttl in exp:
            if ttl == "5m":
                seen5 = True
            elif seen5:
                raise Err(f"ttl order at block {i}")
        if auto:
            tgt = next(
                (
                    i
                    for i in range(len(blocks) - 1, -1, -1)
                    if blocks[i].kind not in ("thinking", "empty")
                ),
                None,
            )
            if tgt is not None:
                if blocks[tgt].cc and blocks[tgt].cc != auto:
                    raise Err("auto ttl mismatch")
                if auto == "1h" and seen5:
                    raise Err("auto ttl order")
                if not blocks[tgt].cc:
                    exp.append((tgt, auto))
        # --- cumulative hashes; the parameter fingerprints enter where they are rendered
        h, cum, hs, cs, seen = hashlib.sha256((p_tools).encode()), 0, [], [], set()
        for b in blocks:
            if b.sec not in seen:
                seen.add(b.sec)
            if b.sec != "tools" and "sys" not in seen:
                h.update(("|S" + p_system).encode())
                seen.add("sys")
            if b.sec == "messages" and "msg" not in seen:
                h.update(("|M" + p_msgs).encode())
                seen.add("msg")
            h.update(f"|{b.sec}:{b.msg}:{b.kind}:{b.key}".encode())
            cum += b.n
            hs.append(h.hexdigest())
            cs.append(cum)
        total = cum + g
        bps = sorted((i, ttl) for i, ttl in exp if cs[i] >= self.min_cache_tokens)
        if not bps:
            return dict(inp=total, read=0, w5=0, w1=0)

        # --- lookback
        def key(i):
            return (scope, model, hs[i])

        def live(i):
            e = self.store.get(key(i))
            return e if e and e.ready <= t < e.expires else None

        A, hit = 0, None
        for i, _ in bps:
            pos, j = 1, i
            while j >= 0 and pos <= WINDOW:
                if live(j):
                    if cs[j] > A:
                        A, hit = cs[j], j
                    break
                nxt = j - 1
                if nxt >= 0 and not (
                    blocks[nxt].kind == blocks[j].kind
                    and blocks[j].kind in ("tool_use", "tool_result")
                    and blocks[nxt].msg == blocks[j].msg
                ):
                    pos += 1
                j = nxt
        C = cs[bps[-1][0]]
        B_ = max([cs[i] for i, ttl in bps if ttl == "1h" and cs[i] > A], default=A)
        # --- state update
        if ok:
            if hit is not None:
                e = self.store[key(hit)]
                e.expires = max(e.expires, t + TTL[e.ttl])
            for i, ttl in bps:
                e = live(i)
                if e:
                    e.expires = max(e.expires, t + TTL[e.ttl])  # keeps its own ttl
                else:
                    old = self.store.get(key(i))
                    if old and old.ready > t:
                        old.expires = max(old.expires, t + TTL[ttl])  # concurrent writer
                    else:
                        self.store[key(i)] = Entry(cs[i], ttl, begin, t + TTL[ttl])
        return dict(inp=total - C, read=A, w5=max(C - B_, 0), w1=B_ - A)
