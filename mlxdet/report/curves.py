"""Curves as a line of bars, for a terminal that can show nothing better."""

import math
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 60) -> str:
    """Return `values` as one line of bars, averaged down to `width` of them; empty for no values."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(BARS[int((m - low) / ((high - low) or 1.0) * (len(BARS) - 1) + 0.5)] for m in means)


def picture(losses: list[float], places: list[int], width: int = 60) -> list[str]:
    """Return two lines: the loss as bars, and a ^ below each bar that holds a spike, places being indices of losses.

    A bar is the mean of its records, or where a spike is, the full height.
    """
    marked = set(places)
    calm = [v for i, v in enumerate(losses) if i not in marked and math.isfinite(v)]
    if not calm:
        return ["", ""]
    count = min(width, len(losses))
    top, bars, marks, last = max(calm), [], "", calm[0]
    for i in range(count):
        inside = range(round(i * len(losses) / count), round((i + 1) * len(losses) / count))
        spiked = any(j in marked for j in inside)
        last = top if spiked else sum(losses[j] for j in inside) / len(inside)
        bars.append(last)
        marks += "^" if spiked else " "
    return [sparkline(bars, width), marks.rstrip()]
