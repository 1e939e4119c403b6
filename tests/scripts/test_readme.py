"""The README's program runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from scripts.stack import API_KEY, ROOT, running_stack

PRINTED_URL = "http://127.0.0.1:8080"
# A busy machine computes the prompt in seconds.
WAIT_SECONDS = 300


def test_the_snippet_for_the_sdk_runs_as_printed_and_reads_the_second_time(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert program.count(PRINTED_URL) == 1
    with running_stack(tmp_path / "data") as stack:
        command = [sys.executable, "-c", program.replace(PRINTED_URL, stack.gateway)]
        environment = {**os.environ, "ANTHROPIC_API_KEY": API_KEY, "NO_PROXY": "127.0.0.1"}
        printed = [
            subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=WAIT_SECONDS,
            )
            for _ in range(2)
        ]
    assert all(run.returncode == 0 for run in printed), printed[0].stderr
    written_counts = re.findall(r"cache_creation_input_tokens=(\d+)", printed[0].stdout)
    read_counts = re.findall(r"cache_read_input_tokens=(\d+)", printed[1].stdout)
    assert written_counts == read_counts and int(read_counts[0]) > 1024
