"""vLLM's own scheduler and cache manager with our connector in them, and no model behind.

`step` does what EngineCore does: schedule, then take in sampled tokens. With `depth` 2 a step is
taken in only after the next one was scheduled, as asynchronous scheduling does on GPUs. Each token
is a function of the prompt, so equal prompts get equal answers.
"""

from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from engine.backends.vllm.connector import find_connector
from engine.backends.vllm.directive import CALL, PARAM_KEY, Report
from engine.backends.vllm.leases import LeaseManager

BLOCK = 16
TOKEN = "token-of-the-tests"
CONNECTOR = {
    "kv_connector": "HoldfastConnector",
    "kv_role": "kv_producer",
    "kv_connector_module_path": "engine.backends.vllm.connector",
}


def transfer_config(
    *, is_multi: bool = False, beside: dict[str, Any] | None = None, **extra: Any
) -> dict[str, Any]:
    """The `--kv-transfer-config` of our connector, alone or as a MultiConnector's first child."""
    alone = {**CONNECTOR, "kv_connector_extra_config": {"lease_share": 0.5, **extra}}
    role = "kv_producer" if beside is None else "kv_both"
    children = {"connectors": [alone, *([] if beside is None else [beside])]}
    multi = {"kv_connector": "MultiConnector", "kv_role": role}
    return multi | {"kv_connector_extra_config": children} if is_multi or beside else alone


class Simulator:
    max_idle_steps = 3

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int = 129,
        depth: int = 1,
        window: int | None = None,
        second: str | None = None,
        is_multi: bool = False,
        step_tokens: int = 128,
        max_seqs: int = 8,
        max_len: int = 2048,
        is_bound: bool = True,
        drafter: str | None = None,
        beside: dict[str, Any] | None = None,
        is_off: bool = False,
        **extra: Any,
    ) -> None:
        """`is_off`: our connector is expected to switch itself off at its start. `second`: a second
        group of layers, or "window-alone". `extra`: our own settings. `beside`: another connector,
        in a MultiConnector with ours. `window`: tokens that layers of the second group attend to.
        `drafter` is vLLM's `method`, set afterwards: some need a model or package to be configured.
        """
        self.num_accepted = 0
        transfer = transfer_config(is_multi=is_multi, beside=beside, **extra)
        config = _config(
            drafter,
            model=str(model),
            max_model_len=max_len,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=step_tokens,
            kv_transfer_config=transfer,
        )
        config.cache_config.num_gpu_blocks = num_blocks
        if window is not None and second is None:
            second = "window"
        if second == "states":
            config.cache_config.mamba_cache_mode = "align"
        retention = None if second is None else 0
        groups = _groups(second, window or 64)
        cache = KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=retention)
        self.scheduler = _scheduler(config, cache, depth)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        self._depth = depth
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.core = SimpleNamespace(scheduler=self.scheduler)
        ours = find_connector(self.core)
        self.switch = ours.switch
        if not is_off:
            self.leases = ours.leases
            self.tracker = ours.tracker
        if is_bound:
            self.tracker.bind(TOKEN)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.tokens: dict[str, list[int]] = {}
        self.num_idle_steps = 0

    def add(
        self,
        name: str,
        prompt: Iterable[int],
        *,
        max_tokens: int = 2,
        wants: Iterable[tuple[str, int, float]] = (),
        is_asked_for: bool = True,
        scope: str = "scope",
        read: str | None = None,
        watches: Iterable[int] = (),
    ) -> Request:
        """Queue a request; `wants` are (key, tokens, expires_at), `read` is a key."""
        directive = {
            "request_id": name,
            "token": TOKEN,
            "scope": scope,
            "wants": [
                {"key": k, "tokens": n, "expires_at": at, "is_asked_for": is_asked_for}
                for k, n, at in wants
            ],
            "read": read,
            "watches": [{"key": f"name:{n}", "tokens": n} for n in watches],
        }
        return self.add_foreign(
            name, prompt, max_tokens=max_tokens, transfer={PARAM_KEY: directive}, scope=scope
        )

    def add_foreign(
        self,
        name: str,
        prompt: Iterable[int],
        *,
        max_tokens: int = 2,
        transfer: Any = None,
        scope: str = "foreign",
    ) -> Request:
        """Queue a request of vLLM's own routes; `transfer` are its `kv_transfer_params`."""
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )
        request = self.make_request(name, prompt, scope=scope, params=params)
        self.tokens[name] = []
        self.scheduler.add_request(request)
        return request

    def run_foreign(self, name: str, prompt: Iterable[int], transfer: Any = None) -> None:
        self.add_foreign(name, prompt, transfer=transfer)
        self.drain()
        assert len(self.tokens[name]) == 2

    def make_request(
        self, name: str, prompt: Iterable[int], *, scope: str, params: SamplingParams | None = None
    ) -> Request:
        """A request that was not queued."""
        return Request(
            request_id=f"{name}-internal",
            prompt_token_ids=list(prompt),
            sampling_params=params or SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=scope,
            block_hasher=self._hasher,
        )

    def step(self) -> None:
        """Schedule one step and, with the pipeline full, take in the oldest."""
        output = self.scheduler.schedule()
        is_idle = not output.total_num_scheduled_tokens
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        self._in_flight.append((output, self._run(output)))
        while len(self._in_flight) >= self._depth:
            self._take_in()

    def propose(self) -> None:
        """What vLLM's drafters do after a step; half of it is accepted in the next."""
        names = [r.request_id for r in self.scheduler.running if r.num_output_tokens]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[1, 2, 3, 4] for _ in names]))

    def drain(self) -> None:
        """Step until no request is left. Fail if steps pass in which nothing was scheduled."""
        while self.scheduler.has_requests():
            self.step()
            assert self.num_idle_steps <= self.max_idle_steps, "nothing can run"
        while self._in_flight:
            self._take_in()
        self.num_idle_steps = 0

    def run(self, name: str, prompt: Iterable[int], **options: Any) -> Report:
        """One request from arrival to end."""
        self.add(name, prompt, **options)
        self.drain()
        return self.report(name)

    def until_started(self, name: str) -> None:
        while not self.tokens[name]:
            self.step()
            assert self.num_idle_steps <= self.max_idle_steps, "nothing can run"

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(f"{name}-internal", RequestStatus.FINISHED_ABORTED)

    def preempt(self, name: str) -> None:
        """What vLLM's scheduler does to the last one running when another needs its room."""
        request = self.scheduler.requests[f"{name}-internal"]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def report(self, name: str) -> Report:
        report = self.tracker.report(name)
        assert report is not None
        return report

    def states(self) -> dict[str, str]:
        return {key: self.leases.state(key) for key in list(self.leases._entries)}

    def losses(self) -> dict[str, str]:
        return {loss.key: loss.reason for loss in self.leases.take_losses()}

    def flood(self, times: float, *, length: int = 500, scope: str = "flood") -> None:
        """Unmarked prompts of `times` the pool's tokens, all different."""
        num = int(times * self.leases.total_blocks * BLOCK / length) + 1
        for index in range(num):
            self.run(f"flood-{scope}-{index}", tokens_of(f"{scope}{index}", length), scope=scope)

    def call(self, name: str, *args: Any) -> Any:
        """A utility call as EngineCore dispatches it."""
        return getattr(EngineCore, CALL.format(name))(self.core, *args)

    def check_refs(self) -> None:
        """Idle: every reference in the pool is a lease's."""
        check_leases(self.leases)
        used = self.leases.total_blocks - self.pool.get_num_free_blocks()
        assert used == self.leases.num_leased_blocks
        assert not self.leases._protected

    def _run(self, output: Any) -> ModelRunnerOutput:
        """One sampled token for each request whose prompt this step completes, or who decodes."""
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        sampled: list[list[int]] = []
        for name, request in zip(names, requests, strict=True):
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            accepted = drafts[: len(drafts) // 2]
            self.num_accepted += len(accepted)
            drawn = [*accepted, request.num_computed_tokens % 97]
            sampled.append([] if request.is_prefill_chunk else drawn)
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)

    def _take_in(self) -> None:
        output, result = self._in_flight.popleft()
        for batch in self.scheduler.update_from_output(output, result).values():
            for answer in batch.outputs:
                self.tokens[answer.request_id.removesuffix("-internal")] += answer.new_token_ids


def _config(drafter: str | None, **options: Any) -> Any:
    """The engine's configuration, without what a `drafter` needs to be configured."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    config = EngineArgs(
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        speculative_config=None if drafter is None else speculation,
        **options,
    ).create_engine_config()
    if drafter is not None:
        config.speculative_config.method = drafter
    return config


def _scheduler(config: Any, cache: KVCacheConfig, depth: int) -> Scheduler:
    return (Scheduler if depth == 1 else AsyncScheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def _groups(second: str | None, window: int) -> list[KVCacheGroupSpec]:
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    specs: dict[str, Any] = {
        "window": lambda: SlidingWindowSpec(sliding_window=window, **shape),
        "latent-window": lambda: SlidingWindowMLASpec(sliding_window=window, **shape),
        "chunks": lambda: ChunkedLocalAttentionSpec(attention_chunk_size=window, **shape),
        "states": lambda: MambaSpec(
            block_size=BLOCK,
            shapes=((1, 32),),
            dtypes=(torch.float32,),
            page_size_padded=full.page_size_bytes,
            mamba_cache_mode="align",
        ),
    }
    if second == "window-alone":
        return [KVCacheGroupSpec(["window"], specs["window"]())]
    groups = [KVCacheGroupSpec(["full"], full)]
    if second is not None:
        groups.append(KVCacheGroupSpec([second], specs[second]()))
    return groups


def tokens_of(name: str, length: int) -> list[int]:
    """Tokens that begin with the name's own and so are nobody else's."""
    head = [10 + byte for byte in name.encode()]
    return [*head, *(400 + (index * 7) % 3000 for index in range(length - len(head)))]


def check_leases(leases: LeaseManager) -> None:
    """Prove that books, leases and dependents agree; raises AssertionError."""
    leased = [hold for hold in leases._entries.values() if hold.is_leased]
    assert len(leased) == sum(map(len, leases._leases.values()))
    assert leases._lease_refs == Counter(b.block_id for h in leased for b in h.blocks)
    assert len(leases._lease_refs) <= leases.max_leased_blocks
    for scope, refs in leases._scope_refs.items():
        mine = [hold for hold in leased if hold.scope == scope]
        assert set(mine) == set(leases._leases[scope])
        assert refs == Counter(b.block_id for hold in mine for b in hold.blocks)
    for hold in leases._entries.values():
        for block in hold.blocks:
            assert hold.is_leased != (hold in leases._dependents.get(block.block_id, ()))
    ours = leases._lease_refs + leases._protected
    assert all(leases._pool.blocks[block_id].ref_cnt >= n for block_id, n in ours.items())
