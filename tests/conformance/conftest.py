"""One process per backend and profile for the whole session, started when first needed."""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import pytest

from engine.protocol import Capability, GuaranteeName
from engine.protocol.reports import EntryInfo
from tests.conformance.engines import OF_VLLM, PROFILES, Engine, Settings, running_engine

# Such as `vllm`, which needs an environment of its own: VLLM_PYTHON is its interpreter.
ASKED = os.environ.get("CONFORMANCE_BACKENDS", "").split()
# Every commit runs the engine that computes; scripts/long_tests conformance runs both.
BACKENDS = ASKED or ["native", pytest.param("synthetic", marks=pytest.mark.slow)]
MODEL = os.environ.get("CONFORMANCE_MODEL")
"""A model's directory for the native engine, such as that of a hybrid."""
SKIPS = Path(__file__).with_name("vllm_skips.txt")
SKIPPED: dict[str, str] = {}
LLAMACPP_SKIPS = Path(__file__).with_name("llamacpp_skips.txt")
VLLM_BLOCK_SIZE = 32
TINY_CONTEXT = 512
TINY_BLOCK = 32
TINY_BYTES = 8 * TINY_BLOCK * 4100
"""Eight blocks of `full.gguf` with a cache of 32 bits: what leases of the tiny engine may hold. It
can't be less than a mebibyte."""
DECLARED = ("backend", "granularity")
Fleet = Callable[[str, str], Engine]


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The engine of a backend and a profile; profiles that are equal for it share one."""
    running: dict[tuple[str, str], Engine] = {}
    with ExitStack() as stack:

        def engine_of(backend: str, profile: str) -> Engine:
            settings = settings_of(backend, profile)
            key = (backend, repr(sorted(settings.items())))
            if key not in running:
                running[key] = stack.enter_context(new_engine(backend, profile))
            return running[key]

        yield engine_of


@contextmanager
def new_engine(backend: str, profile: str, **more: str) -> Iterator[Engine]:
    """An engine of a backend and a profile that nothing else shares, with `more` settings."""
    settings = settings_of(backend, profile)
    with ExitStack() as stack:
        process = backend
        if backend == "llamacpp":
            process = "upstream"
            settings = stack.enter_context(_before_llamacpp(settings, profile))
        yield stack.enter_context(running_engine(process, {**settings, **more}))


@contextmanager
def _before_llamacpp(settings: Settings, profile: str) -> Iterator[Settings]:
    """The settings of an engine before a real llama-server with slot files of its own."""
    # It needs httpx and a program that most runs don't have.
    from tests.engine.backends.upstream.slots.real import FLAGS, Real, serving, settings_before

    context = TINY_CONTEXT if profile == "tiny" else 8192
    with TemporaryDirectory(prefix="llamacpp-") as root:
        real = Real(Path(root, "slots"), context=context, num_slots=4)
        more = {key: value for key, value in settings.items() if key not in OF_VLLM}
        if profile == "tiny":
            real.flags = (*FLAGS, "-ctk", "f32", "-ctv", "f32")
            more |= {"STORE_BYTES": TINY_BYTES, "BLOCK_SIZE": TINY_BLOCK}
        with serving(real):
            yield settings_before(real) | more


def settings_of(backend: str, profile: str) -> dict[str, str | int | float]:
    """A profile's settings that say anything to this backend."""
    settings = dict(PROFILES[profile])
    if backend == "native" and MODEL:
        settings["MODEL"] = MODEL
    if backend != "synthetic":
        settings = {k: v for k, v in settings.items() if not k.startswith("SYNTHETIC_")}
    if backend in ("vllm", "upstream"):
        # vLLM's attention on a CPU takes blocks of 32 tokens, and a context must fit into the pool.
        num_blocks = int(settings["NUM_BLOCKS"])
        longest = min(num_blocks * VLLM_BLOCK_SIZE, 16_384)
        settings |= {
            "BLOCK_SIZE": VLLM_BLOCK_SIZE,
            "VLLM_ARGS": f'{{"max_model_len": {longest}}}',
        }
    return settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip by its name what leases in slot files, which share no blocks, are excused from."""
    excused = _listed(LLAMACPP_SKIPS)
    for item in items:
        why = excused.get(item.nodeid.removeprefix("tests/conformance/"))
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def _listed(place: Path) -> dict[str, str]:
    """Names of tests with the reasons why they are skipped."""
    lines = place.read_text("utf-8").splitlines()
    return dict(line.split("  ", 1) for line in lines if line and not line.startswith("#"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what an engine on vLLM is excused from."""
    if report.skipped and "[vllm" in report.nodeid:
        _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, "")
        name = report.nodeid.removeprefix("tests/conformance/")
        SKIPPED[name] = reason.removeprefix("Skipped: ")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip on vLLM that is not in the checked-in list, with its reason, fails the run."""
    listed = _listed(SKIPS)
    unlisted = {name: why for name, why in SKIPPED.items() if listed.get(name) != why}
    for name, why in sorted(unlisted.items()):
        print(f"\nskipped, and not in {SKIPS.name}: {name}  {why}")
    unnamed = [name for name, why in SKIPPED.items() if not _names_what_is_declared(why)]
    for name in sorted(unnamed):
        print(f"\nskipped without a word of what the engine declares: {name}")
    if unlisted or unnamed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _names_what_is_declared(reason: str) -> bool:
    """`declares NAME …` or `does not declare NAME …`, with a name of the engine's description."""
    match = re.match(r"(?:declares|does not declare) (\w+)", reason)
    return match is not None and match[1] in {
        *get_args(Capability),
        *get_args(GuaranteeName),
        *DECLARED,
    }


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "native" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return name


def checked(engine: Engine) -> Iterator[Engine]:
    """After each test the engine lives, rests, and holds no block but by leases."""
    yield engine
    assert engine.process.poll() is None, "the engine died"
    engine.wait_until_idle()


@pytest.fixture
def engine(fleet: Fleet, backend: str) -> Iterator[Engine]:
    """Room for everybody; the synthetic one answers at once."""
    yield from checked(fleet(backend, "fast"))


@pytest.fixture
def slow_engine(fleet: Fleet, backend: str) -> Iterator[Engine]:
    """Takes a moment per step, so that something can happen in between."""
    yield from checked(fleet(backend, "slow"))


@pytest.fixture
def tiny_engine(fleet: Fleet, backend: str) -> Iterator[Engine]:
    """Sixteen blocks of sixteen tokens, half of them for leases."""
    engine = fleet(backend, "tiny")
    for entry in engine.get("entries", list[EntryInfo]):
        engine.drop(entry.scope)
    yield from checked(engine)
