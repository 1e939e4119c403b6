"""Turns the scheduler's news of requests into protection, holds and reports.

vLLM's request ids differ from ours (it adds a suffix, and choices of one request get one each), so
states are kept by vLLM's and reported by the directive's.
"""

import hmac
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.backends.vllm.directive import PARAM_KEY, Directive, Held, Report
from engine.backends.vllm.internals import Request
from engine.backends.vllm.leases import Blocks, Hold, LeaseManager
from engine.schedule.request import Ranges

MAX_ENDED = 4_096


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """`found_tokens` is the last look-up's; what of it was reused is settled by admissions."""

    directive: Directive
    request: Request
    protected: Blocks | None = None
    was_protected: bool = False
    is_admitted: bool = False
    found_tokens: int = 0
    hit_tokens: int = 0
    read_tokens: int = 0
    num_taken: int = 0
    claims: list[Hold] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)
    computed: Ranges = field(default_factory=Ranges)

    @property
    def is_started(self) -> bool:
        return self.request.num_output_tokens > 0


class RequestTracker:
    """The tracked requests. Not thread-safe: all calls come from the scheduler's thread."""

    def __init__(self, leases: LeaseManager) -> None:
        self._leases = leases
        self._token: bytes | None = None
        self._states: dict[str, TrackedRequest] = {}
        self._wanting: dict[str, TrackedRequest] = {}
        self._by_id: dict[str, TrackedRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def bind(self, token: str) -> None:
        """Follow directives with this token only. What an earlier server held ends."""
        self.give_back()
        self._leases.take_losses()
        self._token = token.encode()

    @property
    def num_running(self) -> int:
        """Tracked requests that vLLM admitted and that have not ended."""
        return sum(state.is_admitted for state in self._states.values())

    @property
    def request_ids(self) -> Collection[str]:
        """vLLM's ids of the tracked requests."""
        return self._states.keys()

    # What the scheduler tells.

    def arrive(self, request: Request) -> str | None:
        """Protect what the request will read; why its directive can't be followed, if so."""
        given = request.kv_transfer_params
        params = given.get(PARAM_KEY) if isinstance(given, Mapping) else None
        if params is None:
            return None
        if not self._is_ours(params):
            return "it does not carry the server's token"
        try:
            directive = msgspec.convert(params, Directive)
        except msgspec.ValidationError as error:
            return str(error)
        state = TrackedRequest(directive, request)
        directive.wants.sort(key=lambda want: want.tokens)
        self._leases.set_share(directive.scope, directive.lease_blocks)
        if directive.read is not None:
            state.protected = self._leases.protect(directive.read)
            state.was_protected = state.protected is not None
        self._states[request.request_id] = state
        self._by_id.setdefault(directive.request_id, state)
        self._ended.pop(directive.request_id, None)
        if directive.wants:
            self._wanting[request.request_id] = state
        self._leases.watches.arrive(request, directive)
        return None

    def look_up(self, request_id: str, hit_tokens: int) -> None:
        """vLLM found this in its cache; it may ask again before it admits."""
        state = self._states.get(request_id)
        if state is not None:
            state.found_tokens = hit_tokens

    def admit(self, request_id: str) -> None:
        """The request has its blocks, for the first time or after it was preempted."""
        state = self._states.get(request_id)
        if state is None or state.is_started:
            return
        hit_tokens, read_tokens = state.found_tokens, self._readable(state)
        if state.is_admitted:
            # What an admission did not find it computed itself: the next one finds that as well,
            # which makes it no reuse. vLLM's own `num_cached_tokens` stays the first one's.
            hit_tokens = min(hit_tokens, state.hit_tokens)
            read_tokens = min(read_tokens, state.read_tokens)
            self._want_again(state)
        state.hit_tokens, state.read_tokens = hit_tokens, read_tokens
        state.is_admitted = True
        self._unprotect(state)

    def schedule(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """A step was made up: note what it computes, and hold the wants whose blocks it hashed."""
        self._leases.watches.schedule(num_scheduled_tokens)
        for request_id, num_scheduled in num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None and not state.is_started:
                _note_computed(state, num_scheduled)
        for request_id, state in list(self._wanting.items()):
            scheduled = num_scheduled_tokens.get(request_id)
            if scheduled is not None:
                # vLLM adds the step's tokens after it has told us.
                self._take(state, state.request.num_computed_tokens + scheduled)

    def end(self, request_id: str) -> None:
        """Finished, failed or aborted: what it made before its first token goes with it."""
        state = self._states.pop(request_id, None)
        if state is None:
            return
        self._leases.watches.end(request_id)
        self._wanting.pop(request_id, None)
        self._unprotect(state)
        for hold in state.claims:
            self._leases.end_claim(hold, request_id, is_started=state.is_started)
        our_id = state.directive.request_id
        if self._by_id.get(our_id) is state:
            self._ended[our_id] = None
            if len(self._ended) > MAX_ENDED:
                oldest, _ = self._ended.popitem(last=False)
                del self._by_id[oldest]

    # Under pressure.

    def give_up(self, except_id: str) -> bool:
        """Let the newest waiting request give up its protected blocks. False if none has any."""
        for request_id, state in reversed(self._states.items()):
            if request_id != except_id and state.protected is not None:
                self._unprotect(state)
                return True
        return False

    def give_up_all(self) -> None:
        """The cache is emptied, so no request will read from it."""
        for state in self._states.values():
            self._unprotect(state)

    def give_back(self) -> None:
        """End every protection and every hold."""
        self.give_up_all()
        self._leases.reset()

    # What the server asks, and the managers of sliding windows.

    def report(self, request_id: str) -> Report | None:
        """By the directive's id; of those that ended the last 4,096 are remembered."""
        state = self._by_id.get(request_id)
        if state is None:
            return None
        held = [
            Held(key=want.key, state=self._leases.state(want.key), tokens=state.made[want.key])
            if want.key in state.made
            else Held(key=want.key, state="none", tokens=0)
            for want in state.directive.wants
        ]
        return Report(
            request_id=request_id,
            hit_tokens=state.hit_tokens,
            read_tokens=state.read_tokens,
            held=held,
            computed_tokens=state.computed.total,
        )

    def boundaries(self, request_id: str) -> list[int]:
        """Where later requests may begin because this one is marked there."""
        state = self._states.get(request_id)
        if state is None:
            return []
        return [self._leases.align(want.tokens) for want in state.directive.wants]

    # Inside.

    def _is_ours(self, params: Any) -> bool:
        given = params.get("token") if isinstance(params, Mapping) else None
        if self._token is None or not isinstance(given, str):
            return False
        # JSON can hold halves of characters, which UTF-8 alone refuses.
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._token)

    def _readable(self, state: TrackedRequest) -> int:
        """How much of the entry that it was to read the last look-up found."""
        directive = state.directive
        if directive.read is None or not state.was_protected:
            return 0
        # Who gave the protection up may still find the entry whole.
        if state.protected is None and not self._leases.has(directive.read):
            return 0
        return min(state.found_tokens, directive.read_tokens)

    def _take(self, state: TrackedRequest, computed_tokens: int) -> None:
        directive, request = state.directive, state.request
        while state.num_taken < len(directive.wants):
            want = directive.wants[state.num_taken]
            if self._leases.align(want.tokens) > computed_tokens:
                return
            state.num_taken += 1
            if want.tokens > request.num_prompt_tokens:
                continue
            hold = self._leases.hold(
                want, directive.scope, request.block_hashes, request.request_id
            )
            if hold is not None:
                state.made[want.key] = hold.tokens
                if hold not in state.claims:
                    state.claims.append(hold)
        del self._wanting[request.request_id]

    def _want_again(self, state: TrackedRequest) -> None:
        """Preempted before its first token: what was lost with a reset is to be held anew."""
        if state.directive.wants:
            state.num_taken = 0
            self._wanting[state.request.request_id] = state

    def _unprotect(self, state: TrackedRequest) -> None:
        if state.protected is not None:
            self._leases.unprotect(state.protected)
            state.protected = None


def _note_computed(state: TrackedRequest, num_scheduled: int) -> None:
    start = state.request.num_computed_tokens
    end = min(start + num_scheduled, state.request.num_prompt_tokens)
    if end > start:
        state.computed.add(start, end)
