"""A drawing in SVG that stands by itself: no script, no font file, no network; light or dark as its reader has it.

Text is set in a monospaced face, so that its width is known here and nothing needs to overlap. Colours are plain
rules, repeated for dark: viewers that know no media queries show the light ones.
"""

from __future__ import annotations

from html import escape

from rich.cells import cell_len, set_cell_size

FONT = "'DejaVu Sans Mono','Liberation Mono',ui-monospace,Menlo,Consolas,monospace"
CELL_EM = 0.61
"""the widest of these faces has 0.602"""
HUES = {"ready": "#3fb5a0", "taken": "#6f9cf0", "reserved": "#f0b030", "dropped": "#a8a8b0", "other": "#e06070"}
AGES = ((10**9, "under 1 s"), (60 * 10**9, "under 1 min"), (3600 * 10**9, "under 1 h"), (1 << 64, "older"))
LIGHT = {"paper": "#ffffff", "ink": "#1c2128", "soft": "#5b6470", "line": "#d5dae1", "hole": "#e9edf2",
         "tile": "#f6f8fa", "alarm": "#c02030"}
DARK = {"paper": "#0f1318", "ink": "#e8ecf1", "soft": "#98a2ae", "line": "#39424d", "hole": "#232b36",
        "tile": "#171c23", "alarm": "#ff7a85"}
LIGHT_SHADES, DARK_SHADES = (1.0, 0.72, 0.48, 0.28), (0.68, 0.54, 0.41, 0.29)
"""how strong a hue is at each age: under light text full ones would be too bright"""


def kind_class(state: str, age_ns: int) -> str:
    """The class of a run: its state, and how old it is in four steps."""
    step = next((step for step, (limit, _) in enumerate(AGES) if age_ns < limit), len(AGES) - 1)
    return f"{state if state in HUES else 'other'}{step}"


class Canvas:
    """A drawing `width` wide that grows downward: whoever draws moves `y`."""

    def __init__(self, width: int):
        self.width, self.y = width, 0.0
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "",
             round_by: int = 0) -> None:
        corners = f' rx="{round_by}"' if round_by else ""
        inside = f"<title>{clean(title)}</title>" if title else ""
        self._parts.append(f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
                           f'{corners}{f">{inside}</rect>" if inside else "/>"}')

    def text(self, x: float, y: float, text: str, size: int = 12, kind: str = "ink", anchor: str = "start",
             room: float | None = None) -> float:
        """Text on the base line y, cut to `room`; returns its width."""
        shown = text if room is None else cut(text, room, size)
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" font-size="{size}"{where}>'
                           f'{clean(shown)}</text>')
        return text_width(shown, size)

    def line(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._parts.append(f'<polyline class="line" points="{path}"/>')

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        self._parts.append(f'<circle class="{kind}" cx="{x:.2f}" cy="{y:.2f}" r="{radius}"/>')

    def svg(self, title: str) -> str:
        body = "\n".join(self._parts)
        height = round(self.y)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
                f'viewBox="0 0 {self.width} {height}" role="img">\n'
                f'<title>{clean(title)}</title>\n<style>{style()}</style>\n'
                f'<rect class="paper" width="{self.width}" height="{height}"/>\n{body}\n</svg>\n')


def clean(text: str) -> str:
    """Text that is safe between tags: escaped, and without characters that XML forbids or that turn the line around."""
    return escape("".join(character if character.isprintable() else "?" for character in text))


def text_width(text: str, size: float) -> float:
    return cell_len(text) * CELL_EM * size


def cut(text: str, room: float, size: float) -> str:
    """The text, or as much of it as fits with dots behind."""
    cells = int(room / (CELL_EM * size))
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, max(0, cells - 2)).rstrip() + ".." if cells > 2 else ""


def style() -> str:
    dark = _rules(DARK, DARK_SHADES)
    return (f"text{{font-family:{FONT}}}.bold{{font-weight:bold}}.line{{fill:none}}"
            f"{_rules(LIGHT, LIGHT_SHADES)}@media (prefers-color-scheme:dark){{{dark}}}")


def _rules(colours: dict[str, str], shades: tuple[float, ...]) -> str:
    rules = [f".{name}{{fill:{colours[name]}}}" for name in ("paper", "ink", "soft", "hole", "tile", "alarm")]
    rules += [f".bold{{fill:{colours['ink']}}}", f".line{{stroke:{colours['line']}}}",
              f".branch{{fill:{colours['paper']};stroke:{colours['soft']}}}"]
    rules += [f".{name}{step}{{fill:{_mixed(hue, colours['paper'], share)}}}"
              for name, hue in HUES.items() for step, share in enumerate(shades)]
    return "".join(rules)


def _mixed(hue: str, paper: str, share: float) -> str:
    pairs = ((int(hue[at:at + 2], 16), int(paper[at:at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(one * share + other * (1 - share)):02x}" for one, other in pairs)
