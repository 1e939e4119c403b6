"""Take the screenshots that dashboard/README.md shows, and check each page that is on them.

Two engines with traffic are drawn at three quarters of their size, the other states, widths and the
dark theme at half of it. The checks are those of `scripts.docs.page_matrix`. The table of pictures
in dashboard/README.md is written anew from the files that there are.

    python -m scripts.docs.shots [--out dashboard/screenshots] [--pages a,b] [--states two,empty]
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from scripts.docs.page_matrix import PAGES, Drawn, look, stack_in
from scripts.setup.options import parse
from scripts.stack import ROOT

NUM_TURNS = 20_000
BEGIN, END = "<!-- pictures: written by scripts.docs.shots -->", "<!-- end of pictures -->"


@dataclass(frozen=True, slots=True)
class Shot:
    """A state of the data as it is drawn; `scale` is the picture's size against the page's."""

    theme: str
    width: int
    scale: float = 0.5
    quality: int = 50

    def column(self, state: str) -> str:
        return f"{state}-{self.theme}-{self.width}"


SHOTS: dict[str, tuple[Shot, ...]] = {
    "two": (Shot("light", 1440, 0.75), Shot("dark", 1440), Shot("light", 480)),
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
    num_problems = 0
    for state in options.states.split(","):
        with stack_in(state, NUM_TURNS) as stack:
            for shot in SHOTS[state]:
                for drawn in look(stack, state, [shot.theme], pages, [shot.width]):
                    num_problems += len(drawn.problems)
                    print(
                        write(drawn, shot, options.out).name,
                        *drawn.problems,
                        sep="\n  ",
                        flush=True,
                    )
    write_table(options.out, ROOT / "dashboard" / "README.md")
    print(f"{num_problems} problems")
    return 1 if num_problems else 0


def write(drawn: Drawn, shot: Shot, out: Path) -> Path:
    image = Image.open(io.BytesIO(drawn.picture)).convert("RGB")
    size = (round(image.width * shot.scale), round(image.height * shot.scale))
    if shot.scale != 1:
        image = image.resize(size, Image.Resampling.LANCZOS)
    path = out / f"{drawn.sight}-{drawn.state}-{drawn.theme}-{drawn.width}.webp"
    image.save(path, "WEBP", quality=shot.quality, method=6)
    return path


def write_table(pictures: Path, readme: Path) -> None:
    """A row for each page, a column for each state that has pictures; between the two marks."""
    columns = [shot.column(state) for state, shots in SHOTS.items() for shot in shots]
    columns = [name for name in columns if any(pictures.glob(f"*-{name}.webp"))]
    names = [each for page in PAGES for each in (page, f"{page}-picked")]
    lines = [f"| page | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = [
            f"[see](screenshots/{name}-{column}.webp)"
            if (pictures / f"{name}-{column}.webp").exists()
            else ""
            for column in columns
        ]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
    readme.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
