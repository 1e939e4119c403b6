"""Take the screenshots that READMEs show, and check each page that is on them.

They show the sample month, at three quarters of their size. The checks are those of
`scripts.docs.page_matrix`, which draws all pages in all states.

    python -m scripts.docs.shots [--out dashboard/screenshots]
"""

import io
import sys
from pathlib import Path

from PIL import Image

from scripts.docs.page_matrix import look, stack_in
from scripts.setup.options import parse
from scripts.stack import ROOT

STATE = "month"
NUM_TURNS = 20_000
THEME = "light"
WIDTH = 1440
SCALE = 0.75
PAGES = ("overview", "savings", "prefixes", "memory")
"""The pages that a README shows."""


def main() -> int:
    options = parse(__doc__, out=ROOT / "dashboard" / "screenshots")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    num_problems = 0
    with stack_in(STATE, NUM_TURNS) as stack:
        for sight in look(stack, STATE, [THEME], PAGES, [WIDTH]):
            image = Image.open(io.BytesIO(sight.picture)).convert("RGB")
            size = round(image.width * SCALE), round(image.height * SCALE)
            path = out / f"{sight.name}.webp"
            image.resize(size, Image.Resampling.LANCZOS).save(path, quality=50, method=6)
            num_problems += len(sight.problems)
            print(path.name, *sight.problems, sep="\n  ", flush=True)
    print(f"{num_problems} problems")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
