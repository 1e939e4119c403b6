"""Take the screenshots that dashboard/README.md shows, and check each page that is on them.

Two engines with traffic are drawn in full size. The other states, widths and the dark theme are
drawn at half the size, to be looked over. The checks are those of `scripts.docs.page_matrix`.

    python -m scripts.docs.shots [--out dashboard/screenshots] [--pages a,b] [--states two,empty]
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from scripts.docs.dashboard_stack import PAGES
from scripts.docs.page_matrix import Drawn, look, stack_in
from scripts.options import parse
from scripts.stack import ROOT

NUM_TURNS = 20_000


@dataclass(frozen=True, slots=True)
class Shot:
    """A state of the data as it is drawn; `scale` is the picture's size against the page's."""

    theme: str
    width: int
    scale: float = 0.5
    quality: int = 55


SHOTS: dict[str, tuple[Shot, ...]] = {
    "two": (Shot("light", 1440, 1.0), Shot("dark", 1440), Shot("light", 480)),
    "empty": (Shot("dark", 1200),),
    "one": (Shot("light", 1200),),
    "four": (Shot("dark", 1920),),
    "month": (Shot("light", 1920),),
}


def main() -> int:
    options = parse(
        __doc__,
        out=ROOT / "dashboard" / "screenshots",
        pages=",".join(PAGES),
        states=",".join(SHOTS),
    )
    pages = [name for name in options.pages.split(",") if name in PAGES]
    options.out.mkdir(parents=True, exist_ok=True)
    num_problems = num_taken = 0
    for state in options.states.split(","):
        with stack_in(state, NUM_TURNS) as stack:
            for shot in SHOTS[state]:
                for drawn in look(stack, state, [shot.theme], pages, [shot.width]):
                    num_taken += 1
                    num_problems += len(drawn.problems)
                    report(drawn, write(drawn, shot, options.out))
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{num_taken} screenshots, {size / 1024:,.0f} KiB, {num_problems} problems")
    return 1 if num_problems else 0


def write(drawn: Drawn, shot: Shot, out: Path) -> Path:
    image = Image.open(io.BytesIO(drawn.picture)).convert("RGB")
    size = (round(image.width * shot.scale), round(image.height * shot.scale))
    if shot.scale != 1:
        image = image.resize(size, Image.Resampling.LANCZOS)
    path = out / f"{drawn.sight}-{drawn.state}-{drawn.theme}-{drawn.width}.webp"
    image.save(path, "WEBP", quality=shot.quality, method=6)
    return path


def report(drawn: Drawn, path: Path) -> None:
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)
    for problem in drawn.problems:
        print(f"  {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
