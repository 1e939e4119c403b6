"""F2: a restarted engine holds nothing. The first use of a prefix is a write, and says why."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.faults.sizes import number, told
from tests.gateway.serving import eventually

ENGINE = {"ENGINE_MIN_CACHE_TOKENS": "64", "ENGINE_SYNTHETIC_DECODE_MS": "10"}
CLIENTS = 8


class Askers:
    """Each keeps asking over a prefix of its own, through every restart."""

    def __init__(self, fleet: Fleet) -> None:
        self._gateway = fleet.gateways[0]
        self._stopping = threading.Event()
        self.answers: list[list[dict[str, Any]]] = [[] for _ in range(CLIENTS)]
        self.failed: Counter[int] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: int) -> None:
        # No two prefixes are versions of one text.
        system = f"Client {client} has {client * client} rules. " * 60
        while not self._stopping.is_set():
            reply = self._gateway.ask(system, f"q{len(self.answers[client])}")
            if reply.status_code == 200:
                self.answers[client].append(reply.json())
            else:
                self.failed[reply.status_code] += 1
                time.sleep(0.05)

    def go_on(self) -> None:
        """Wait until everybody has read what they wrote, and is asking again."""
        least_answers = [len(answers) + 3 for answers in self.answers]
        eventually(
            lambda: all(len(a) >= n for a, n in zip(self.answers, least_answers, strict=True))
        )

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(1800)
def test_no_restart_of_an_engine_leads_to_a_read_of_what_is_gone(tmp_path: Path) -> None:
    restarts = number(2, 20)
    with running_fleet(tmp_path, settings=ENGINE) as fleet:
        askers = Askers(fleet)
        try:
            for _ in range(restarts):
                askers.go_on()
                fleet.kill()
                fleet.restart()
            askers.go_on()
        finally:
            askers.stop()
        rows = fleet.gateway.rows()
    rows.sort(key=lambda row: (row["opened_at"], row["id"]))
    firsts = Counter[str]()
    reads = 0
    keys: set[tuple[str, str]] = set()
    for row in rows:
        if not row["epoch"] or row["outcome"] not in ("stop", "length"):
            continue
        key = (row["epoch"], row["prefix"])
        if key in keys:
            reads += row["cache_read_tokens"] > 0
            assert row["cache_read_tokens"] > 0 or row["miss_reason"] == "in_progress_race", row
            continue
        keys.add(key)
        assert row["cache_read_tokens"] == 0, f"read what no engine holds: {row}"
        firsts[row["miss_reason"]] += 1
    epochs = {epoch for epoch, _ in keys}
    told(
        "F2",
        restarts=restarts,
        epochs=len(epochs),
        first_uses=dict(firsts),
        wrong_reads=0,
        reads=reads,
    )
    assert len(epochs) == restarts + 1 and reads > restarts * CLIENTS
    assert firsts["cold"] == CLIENTS and firsts["engine_restart"] >= restarts * CLIENTS * 0.9
