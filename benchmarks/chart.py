"""Draws docs/speed.svg: the speeds on HalfCheetah-v5 in the README's table, as bars. `python -m benchmarks.chart`

The numbers are read from the README, so the figure cannot differ from the table. All bars have the same scale. The
colors follow the reader's light or dark mode.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]

TITLE = "HalfCheetah-v5 on two CPU cores: env-steps per second"
NOTE = "Longer is faster. TorchRL and CleanRL were not measured."
WIDTH, NAMES, SCALE = 720, 206, 440  # pixels: of the figure, of the column of names, of the longest bar
STYLE = """
text { font-family: "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 } .group { font-size: 13px; font-weight: 600; fill: #57606a }
.name { text-anchor: end } .note { fill: #57606a }
.back { fill: #ffffff } .ours { fill: #3f51b5 } .rival { fill: #b6bcc6 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .group, .note { fill: #9198a1 }
  .back { fill: #0d1117 } .ours { fill: #8c9eff } .rival { fill: #656d76 }
}
"""


def tables(page: str) -> list[list[list[str]]]:
    """Returns the cells of each Markdown table: its header and its rows."""
    found = re.findall(r"((?:^\|.*\n)+)", page, flags=re.MULTILINE)
    split = [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in one.splitlines()] for one in found]
    return [[rows[0], *rows[2:]] for rows in split]


def speeds(page: str) -> dict[str, dict[str, int]]:
    """Returns the env-steps per second in the README's table of speeds: by row, by name. Ours come first."""
    (table,) = [table for table in tables(page) if table[0][1:] == ["ours", "rivals"]]
    found = {}
    for what, *cells in table[1:]:
        pairs = re.findall(r"(\S[^:]*): ([\d,]+)(?: \([\d.]+ x\))?(?:, )?", re.sub("[*`]", "", " ".join(cells)))
        found[what] = {name: int(number.replace(",", "")) for name, number in pairs}
    return found


def draw(groups: dict[str, dict[str, int]]) -> str:
    """Returns the figure as SVG."""
    longest = max(max(rates.values()) for rates in groups.values())
    lines, y = [], 44
    for group, rates in groups.items():
        lines.append(f'<text class="group" x="16" y="{y + 16}">{escape(group[0].upper() + group[1:])}</text>')
        y += 24
        for name, rate in rates.items():
            kind, width = "rival" if name != next(iter(rates)) else "ours", round(SCALE * rate / longest, 1)
            lines += [
                f'<text class="name" x="{NAMES - 8}" y="{y + 13}">{escape(name)}</text>',
                f'<rect class="{kind}" x="{NAMES}" y="{y}" width="{width}" height="17" rx="2"/>',
                f'<text class="value" x="{NAMES + width + 6:g}" y="{y + 13}">{rate:,}</text>',
            ]
            y += 22
        y += 12
    size = f'width="{WIDTH}" height="{y + 24}"'
    head = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" {size} role="img">
<title>{TITLE}</title>
<style>{STYLE}</style>
<rect class="back" {size}/>
<text class="title" x="16" y="26">{TITLE}</text>"""
    return "\n".join([head, *lines, f'<text class="note" x="16" y="{y + 10}">{NOTE}</text>', "</svg>\n"])


if __name__ == "__main__":
    groups = speeds((ROOT / "README.md").read_text())
    chosen = {what: rates for what, rates in groups.items() if "HalfCheetah" in what or "training" in what}
    (ROOT / "docs" / "speed.svg").write_text(draw(chosen))
