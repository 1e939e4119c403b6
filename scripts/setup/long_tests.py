"""What is too long for every commit.

    scripts/long_tests                            lists what there is, and how long each takes
    scripts/long_tests WHAT [arguments]           arguments are pytest's, or those of the program

Examples are drawn anew in each run, from a seed that is printed; TEST_SEED=N draws the same again.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts.setup.install_needs import install
from scripts.stack import ROOT, python

BEAT_SECONDS = 60.0
PYTEST = (*python("pytest"), "--timeout", "0", "-rP", "-p", "no:randomly")


@dataclass(frozen=True, slots=True)
class LongTest:
    """`minutes` are a rough figure on two cores; `numbers` may be overridden by the environment."""

    about: str
    minutes: int
    command: tuple[str, ...]
    numbers: Mapping[str, str] = field(default_factory=dict)
    is_pytest: bool = True


def pytest_job(about: str, minutes: int, *tests: str, **numbers: str) -> LongTest:
    return LongTest(about, minutes, (*PYTEST, *tests), numbers)


def program(about: str, minutes: int, *command: str, **numbers: str) -> LongTest:
    return LongTest(about, minutes, command, numbers, is_pytest=False)


JOBS = {
    "machine": pytest_job(
        "state machine over pool, tables, entries, leases, host tier: 5,000 runs of 80 steps",
        3,
        "--hypothesis-show-statistics",
        "tests/engine/cache/test_state_machine.py",
        BLOCK_EXAMPLES="5000",
        BLOCK_STEPS="80",
    ),
    "cuts": pytest_job(
        "streams of every dialect, cut in two at every byte, read by the official SDKs",
        3,
        "tests/gateway/routing/test_stream_splits.py",
        CUT_EVERY="1",
    ),
    "exactness": pytest_job(
        "200 prompts x 3 split points for every way to reuse KV, three model families",
        25,
        "tests/engine/compute/test_splits.py",
        EXACT_PROMPTS="200",
    ),
    "mutants": program(
        "each patch of tests/mutants/ on a copy of the tree: the named tests must fail",
        5,
        *python("tests.faults.mutants"),
    ),
    "pages": program(
        "every page of the dashboard in Chromium: 4 widths, 2 themes, 5 states of its data",
        25,
        *python("scripts.docs.page_matrix"),
    ),
    "conformance": pytest_job(
        "the engines' suite on the native and the synthetic engine, 100 sequences of turns on each",
        10,
        "tests/conformance",
        CONFORMANCE_SEQUENCES="100",
    ),
    "isolation": pytest_job(
        "200 probes of what another workspace has warm",
        10,
        "tests/isolation",
        ISOLATION_PROBES="200",
    ),
    "injections": pytest_job(
        "20,000 prompts with control tokens' texts in every place, over all chat templates",
        5,
        "tests/engine/text/test_injection.py",
        INJECTIONS="20000",
    ),
    "templates": pytest_job(
        "random prompts of every chat template on all five kinds of tokenizers",
        1,
        "tests/engine/text/test_model_templates.py",
        TEMPLATE_KINDS="5",
    ),
    "soak": pytest_job(
        "500 streams at once; python -m tests.faults.soak is the long one",
        5,
        "tests/e2e/test_soak.py",
        SOAK_STREAMS="500",
    ),
    "schema": pytest_job(
        "10,000 requests made from the OpenAPI description, valid ones and not",
        15,
        "tests/gateway/http/test_openapi.py",
        SCHEMA_CASES="10000",
    ),
    "pairs": pytest_job(
        "500 streamed and unstreamed answers on a real engine: equal usage",
        10,
        "tests/e2e/test_usage_pairs.py",
        USAGE_PAIRS="500",
    ),
    "kills": program(
        "50 times kill -9 of the gateway under 50 streams, SQLite and PostgreSQL",
        20,
        *python("tests.faults.kill_gateway"),
    ),
    "engine-kills": program(
        "50 times kill -9 of one of four engines under load, some left hanging",
        15,
        *python("tests.faults.kill_engine"),
    ),
    "faults": pytest_job(
        "every row of the fault table that has a test, with its full number",
        60,
        "tests/faults",
        "tests/gateway/http/test_damaged_bodies.py",
        "tests/gateway/ledger/test_migrations.py",
        "tests/scripts/test_run_stack.py",
        FAULTS="full",
    ),
    "clients": program(
        "other people's clients, unmodified, in environments of their own (.venv-clients*)",
        20,
        *python("scripts.setup.client_tests"),
    ),
    "agents": program(
        "other people's agents, unmodified, before a scripted engine: a table (AGENTS_FOLDER)",
        20,
        *python("scripts.setup.agent_tests"),
    ),
    "vllm": program(
        "engines on vLLM (VLLM_PYTHON or .venv-vllm): conformance, fuzz, SDK",
        40,
        "scripts/setup/vllm_tests",
        "vllm",
    ),
    "plugin": program(
        "an engine mounted into `vllm serve`: conformance",
        30,
        "scripts/setup/vllm_tests",
        "plugin",
    ),
    "install": program(
        "the plugin in an environment that has vLLM alone: all its modules, README's line",
        15,
        "scripts/setup/vllm_tests",
        "install",
    ),
    "upstream": program(
        "an engine in front of an unmodified `vllm serve`: conformance, 1,000 isolation probes",
        30,
        "scripts/setup/vllm_tests",
        "upstream",
    ),
    "leases": program(
        "our connector inside vLLM: its schedulers, a state machine, models, processes",
        30,
        "scripts/setup/vllm_tests",
        "leases",
    ),
    "lease-mutants": program(
        "seeded bugs of the connector, which those tests must notice",
        30,
        "scripts/setup/vllm_tests",
        "lease-mutants",
    ),
}

JOBS["whole"] = program(
    "scripts/test --all with new seeds and all numbers above",
    120,
    *("scripts/test", "--all", "--timeout", "0"),
    TEST_SEED="fresh",
    **{name: value for job in JOBS.values() for name, value in job.numbers.items()},
)


def main(arguments: list[str]) -> int:
    what, *more = arguments or [""]
    if what not in JOBS:
        print(__doc__)
        for name, job in JOBS.items():
            print(f"  {name:14}{job.minutes:>4} min  {job.about}")
        return 0 if what in ("", "-h", "--help") else 2
    job = JOBS[what]
    if job.command[0] != "scripts/setup/vllm_tests":
        install(["gateway", "engine", "test"])
    environment = {**job.numbers, **os.environ}
    command = [*job.command]
    if job.is_pytest:
        seed = environment.setdefault("TEST_SEED", str(random.SystemRandom().randrange(2**32)))
        command.append(f"--hypothesis-seed={seed}")
        print(f"==> {what}: about {job.minutes} minutes on two cores; TEST_SEED={seed}", flush=True)
    else:
        print(f"==> {what}: about {job.minutes} minutes on two cores", flush=True)
    return follow(what, [*command, *more], environment, job.minutes)


def follow(what: str, command: list[str], environment: Mapping[str, str], minutes: int) -> int:
    """Run it, and say once a minute that it goes on: single tests are silent for long."""
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        while True:
            try:
                return process.wait(BEAT_SECONDS)
            except subprocess.TimeoutExpired:
                passed = (time.monotonic() - began) / 60
                print(f"--- {what}: {passed:.0f} of about {minutes} minutes", flush=True)
            except KeyboardInterrupt:
                return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
