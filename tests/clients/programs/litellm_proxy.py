"""LiteLLM's proxy in the background.

python litellm_proxy.py start CONFIG PORT FOLDER    returns when it answers
python litellm_proxy.py stop FOLDER
"""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SECONDS = 220.0
"""Its imports alone take half a minute on a busy machine."""


def start(config: str, port: str, folder: Path) -> int:
    """The exit status: 1 where it ended, or does not answer in SECONDS."""
    log_path = folder / "litellm.log"
    with log_path.open("wb") as log:
        proxy = subprocess.Popen(
            [Path(sys.executable).with_name("litellm"), "--config", config, "--port", port],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (folder / "litellm.pid").write_text(str(proxy.pid))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and proxy.poll() is None:
        if is_live(port):
            return 0
        time.sleep(0.5)
    print(log_path.read_text(errors="replace")[-2000:])
    return 1


def is_live(port: str) -> bool:
    url = f"http://127.0.0.1:{port}/health/liveliness"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["start", config, port, folder]:
            sys.exit(start(config, port, Path(folder)))
        case ["stop", folder]:
            os.killpg(int((Path(folder) / "litellm.pid").read_text()), signal.SIGTERM)
        case _:
            sys.exit(__doc__)
