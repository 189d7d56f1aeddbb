"""A plot as an SVG file: time over size, both logarithmic, a line a backend. Pure; no plotting library is needed."""

from __future__ import annotations

import math
from html import escape

from echelon.bench.comm import Cell, size_words, time_words

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 80, 190, 40, 50
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def svg(cells: list[Cell], op: str, title: str) -> str:
    """The lines of one operation. At least one cell."""
    mine = [cell for cell in cells if cell.op == op and cell.num_bytes > 0]
    sizes, times = sorted({c.num_bytes for c in mine}), [c.median_s for c in mine]
    x0, x1 = math.log(sizes[0]), math.log(sizes[-1])
    y0, y1 = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)) + 1e-9)

    def x(num_bytes: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((math.log(num_bytes) - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def y(seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(seconds) - y0) / max(1, y1 - y0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for power in range(y0, y1 + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{time_words(10.0**power)}</text>'
        )
    for size in sizes:
        parts.append(
            f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{size_words(size)}</text>'
        )
    for number, backend in enumerate(dict.fromkeys(c.backend for c in mine)):
        colour = COLOURS[number % len(COLOURS)]
        row = sorted((c for c in mine if c.backend == backend), key=lambda c: c.num_bytes)
        points = " ".join(f"{x(c.num_bytes):.1f},{y(c.median_s):.1f}" for c in row)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(c.num_bytes):.1f}" cy="{y(c.median_s):.1f}" r="3" fill="{colour}"/>' for c in row
        ]
        at = TOP + 18 * number + 8
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{at - 9}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 34}" y="{at + 1}">{escape(backend)}</text>')
    return "\n".join([*parts, "</svg>", ""])
