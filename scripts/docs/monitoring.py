"""Write the classes of written tokens into every expression of alerts and of Grafana's board.

They are those of `TTLS`, one for each lifetime. Run it after a change of them;
tests/gateway/monitoring fails when it was forgotten.
"""

import re
from pathlib import Path

from engine.protocol import WRITE_FIELDS
from scripts.stack import ROOT

MONITORING = ROOT / "gateway" / "monitoring"
FILES = ("alerts.yml", "grafana.json")
WRITES = "|".join(name.removesuffix("_tokens") for name in WRITE_FIELDS.values())
_WRITTEN = re.compile(r"cache_write_\w+(?:\|cache_write_\w+)*")


def with_classes(text: str) -> str:
    """The text, with every class of written tokens where it names one of them."""
    return _WRITTEN.sub(WRITES, text)


def main() -> None:
    for name in FILES:
        path: Path = MONITORING / name
        path.write_text(with_classes(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
