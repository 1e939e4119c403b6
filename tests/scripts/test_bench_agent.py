"""scripts/bench/agent.py, small: every request is answered, and the nonce line decides the rest."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_coding_agents_prefix_is_read_only_without_its_nonce_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.agent", "--tokens", "2000", "--turns", "6"],
        capture_output=True,
        text=True,
        timeout=850,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(main agent|2 explorers|2 forks|all) +(.+)$", done.stdout, re.MULTILINE)
    tables = [dict(rows[:4]), dict(rows[4:])]
    removed, kept = (
        {name: [int(n) for n in re.findall(r"(?<!\S)[\d,]+(?=\s|$)", row.replace(",", ""))]
         for name, row in counts.items()}
        for counts in tables
    )  # fmt: skip
    for name, (turns, prompt, read, written, _) in removed.items():
        assert turns >= 4
        # Explorers that begin together may each write what they share, and then have one turn to
        # read it in; the others have nothing to wait for.
        assert (0.25 if "explorers" in name else 0.5) * prompt < read < prompt, name
        # What is neither read nor written is the template's words before each answer, and at
        # times a reminder behind the last marker.
        assert 0 <= prompt - read - written < 40 * turns
    for turns, _, read, written, _ in kept.values():
        assert turns >= 4 and read == 0 and written > 0
