"""The servers of the fuzz as processes: two engines with tiny models, and a gateway before them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from scripts.stack import API_KEY, MASTER_SECRET, serving_gateway
from tests.conformance.engines import running_engines
from tests.fuzz.servers import GATEWAY_SLOTS, MINIMUMS, SLOTS, ByGateway, ByProtocol, Machines
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.admin_client import Admin
from tests.gateway.process import new_key
from tests.gateway.serving import eventually

MODELS = ("tiny-one", "tiny-two")
# The second may lease next to nothing: its entries are best-effort, and still in memory.
LEASE_SHARES = (0.5, 0.004)
VLLM_BLOCK_SIZE = 32
MODELS_TOML = """default = "{0}"

[[models]]
id = "{0}"
engine_model = "{0}"
min_cache_tokens = {1}

[[models]]
id = "{2}"
engine_model = "{2}"
min_cache_tokens = {3}
"""


@contextmanager
def running_machines(
    directory: Path, backend: str, slots: int = SLOTS, *, has_kinds: bool = False
) -> Iterator[Machines]:
    """One engine for each model; the synthetic ones answer at once."""
    with ExitStack() as stack:
        house_settings = []
        for name, share in zip(MODELS, LEASE_SHARES, strict=True):
            settings: dict[str, Any] = {
                "CLOCK": "manual",
                "NUM_BLOCKS": 16_384,
                "MAX_RUNNING": slots,
                "MAX_STEP_TOKENS": 1024,
                "LEASE_SHARE": share,
                "SYNTHETIC_PREFILL_US": 0,
                "SYNTHETIC_DECODE_MS": 0,
            }
            if has_kinds:
                settings["APPROXIMATE"] = True
            if backend in ("native", "hybrid"):
                is_hybrid = backend == "hybrid"
                settings["MODEL"] = write_tiny_model(directory / name, is_hybrid=is_hybrid)
            if backend == "vllm":
                settings["MODEL"] = write_tiny_model(directory / name, head_dim=32)
                settings["BLOCK_SIZE"] = VLLM_BLOCK_SIZE
            house_settings.append(settings)
        named = "native" if backend == "hybrid" else backend
        engines = stack.enter_context(running_engines(named, house_settings))
        yield Machines(engines, slots)


@contextmanager
def by_protocol(directory: Path, backend: str = "native") -> Iterator[ByProtocol]:
    with running_machines(directory, backend) as machines:
        yield ByProtocol(machines, len(machines.engines))


@contextmanager
def by_gateway(directory: Path, *, has_kinds: bool = False) -> Iterator[ByGateway]:
    """A gateway with three workspaces, on the native engines."""
    models = MODELS_TOML.format(MODELS[0], MINIMUMS[0], MODELS[1], MINIMUMS[1])
    with ExitStack() as stack:
        machines = stack.enter_context(
            running_machines(directory, "native", GATEWAY_SLOTS, has_kinds=has_kinds)
        )
        url, keys = stack.enter_context(serving(directory, machines, models, ["second", "third"]))
        if has_kinds:
            admin = Admin(url)
            for workspace in admin.get("workspaces"):
                admin.post(f"workspaces/{workspace['id']}", {"may_approximate": True})
            # What may be asked for is measured behind exact turns.
            eventually(
                lambda: not any(row["description"]["is_measuring"] for row in admin.get("engines")),
                seconds=240,
            )
        client = stack.enter_context(httpx.Client(base_url=url, timeout=120))
        server = ByGateway(machines, client, [API_KEY, *keys], list(MODELS))
        server.has_kinds = has_kinds
        yield server


@contextmanager
def serving(
    directory: Path,
    machines: Machines,
    models_toml: str,
    workspaces: Sequence[str],
    master_secret: str = MASTER_SECRET,
) -> Iterator[tuple[str, list[str]]]:
    """A gateway process: its URL, and a new key for each of the workspaces."""
    models = directory / "models.toml"
    data = directory / "data"
    models.write_text(models_toml)
    changes = {"HOLDFAST_MODELS": str(models), "HOLDFAST_LOG_LEVEL": "error"}
    changes["HOLDFAST_MASTER_SECRET"] = master_secret
    urls = [engine.url for engine in machines.engines]
    with serving_gateway(data, urls, changes) as server:
        server.wait()
        yield server.url, [new_key(data, workspace)[1] for workspace in workspaces]
