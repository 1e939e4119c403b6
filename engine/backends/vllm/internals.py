"""The parts of vLLM's inside that we use, as types. `names.py` checks that they have not changed.

Tested with vLLM 0.32 and 0.33, tried with 0.30 and 0.31. This module imports nothing of vLLM.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

HELD = frozenset(
    {
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowMLASpec",
        "SlidingWindowSpec",
    }
)
"""The classes of vLLM's kinds of KV cache whose blocks a later hit takes as they are."""


class VllmBlock(Protocol):
    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> bytes | None: ...


class BlockPool(Protocol):
    num_gpu_blocks: int
    hash_block_size: int
    blocks: Sequence[VllmBlock]
    _maybe_evict_cached_block: Callable[[VllmBlock], bool]

    def touch(self, blocks: Sequence[VllmBlock]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[VllmBlock]) -> None: ...
    def unpin_blocks(
        self, blocks: Iterable[VllmBlock], on_reuse: Callable[[VllmBlock], None]
    ) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class Coordinator(Protocol):
    scheduler_block_size: int
    single_type_managers: Sequence[Any]

    def find_longest_cache_hit(
        self, block_hashes: list[bytes], max_cache_hit_length: int
    ) -> tuple[Sequence[Sequence[VllmBlock]], int, int]: ...


class CacheManager(Protocol):
    block_pool: BlockPool
    coordinator: Coordinator
    enable_caching: bool
    use_eagle: bool
    allocate_slots: Callable[..., Any]
    reset_prefix_cache: Callable[[], bool]


class Request(Protocol):
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None

    @property
    def num_output_tokens(self) -> int: ...


MIN_VERSION = (0, 30)
"""The oldest version that was tried. Whether a later one is known is a matter of `names.py`."""
CPU_ADAPTERS_SINCE = (0, 33)
"""In earlier CPU builds an adapter's weights also act on the base model's rows of the same step."""
ADAPTERS_SINCE = (0, 32)
"""Earlier versions pass over fields of an adapter's config that change what it computes."""


class VllmChangedError(RuntimeError):
    """This vLLM's inside is not known; the message names the version."""


def check_version(version: str, oldest: tuple[int, int] = MIN_VERSION) -> None:
    """Raise VllmChangedError for a vLLM before the `oldest` version."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) < 2 or numbers < oldest:
        raise VllmChangedError(f"vLLM {version} is not known: needs >= 0.{oldest[1]}")


def check_adapters(version: str, *, is_cpu: bool) -> None:
    """Raise VllmChangedError for a vLLM that would compute adapters wrong."""
    check_version(version, ADAPTERS_SINCE)
    try:
        check_version(version, CPU_ADAPTERS_SINCE if is_cpu else ADAPTERS_SINCE)
    except VllmChangedError:
        raise VllmChangedError(
            f"adapters (--enable-lora, ENGINE_ADAPTERS) need vLLM >= 0.33 on a CPU: {version} "
            "computes other rows of a step by an adapter's weights, and keeps what it computed"
        ) from None


def check_layers(groups: Iterable[Any]) -> None:
    """Raise ValueError for layers whose blocks can't be held. The message names their kind."""
    for group in groups:
        spec = group.kv_cache_spec
        # One group may stand for layers of one kind and several shapes.
        specs = getattr(spec, "kv_cache_specs", None)
        for layer_spec in [spec] if specs is None else specs.values():
            kind = type(layer_spec).__name__
            reason = None
            if kind not in HELD:
                reason = "which of their blocks a hit takes is not known"
            elif keeps_states(layer_spec) and layer_spec.mamba_cache_mode == "none":
                reason = "their states are not cached (--mamba-cache-mode align)"
            elif getattr(layer_spec, "bounded_replay", False):
                reason = "a part of each hit is computed again"
            if reason is not None:
                layers = ", ".join(group.layer_names[:2])
                raise ValueError(
                    f"HoldfastConnector can't hold layers of the kind {kind} ({layers}, …): "
                    f"{reason}"
                )


def keeps_states(spec: Any) -> bool:
    """Whether layers keep a recurrent state, as Mamba, GDN and short convolutions do.

    A hit ends where a state is kept.
    """
    return hasattr(spec, "mamba_cache_mode")
