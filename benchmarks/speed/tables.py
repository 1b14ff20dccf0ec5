"""Measured throughput as a text table and as a plot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speed.rounds import OURS, Contender
from speed.throughput import Throughput
from speed.workloads import WORKLOADS

UNITS = {"per_s": "by the clock", "per_cpu_s": "per CPU second"}


def ratios(everyone: Sequence[Contender]) -> dict[str, dict[str, float]]:
    """qfleet divided by each peer with as many lanes: {"qfleet, 8 lanes / sb3, 8 lanes": {"per_s": 1.6, ...}}."""
    found = {}
    for mine in everyone:
        for other in everyone:
            a, b = mine.median, other.median
            if mine.who == OURS != other.who and mine.lanes == other.lanes and a is not None and b is not None:
                found[f"{mine.name} / {other.name}"] = {"per_s": a.per_s / b.per_s,
                                                        "per_cpu_s": a.per_cpu_s / b.per_cpu_s}
    return found


def rows(everyone: Sequence[Contender]) -> list[list[str]]:
    """Table of one workload: medians, and for qfleet the ratio to each peer that was measured with as many lanes."""
    unit = WORKLOADS[everyone[0].work].unit
    others = list(dict.fromkeys(entry.who for entry in everyone if entry.who != OURS and entry.median is not None))
    head = [head for other in others for head in (f"÷ {other}", "per CPU s")]
    table = [["contender", f"{unit}/s", "per CPU s", *head]]
    for entry in everyone:
        median = entry.median
        if median is None:
            table.append([entry.name, entry.problem or "was not measured", *[""] * (len(head) + 1)])
        else:
            table.append([entry.name, _number(median.per_s), _number(median.per_cpu_s),
                          *_shares(entry, everyone, others)])
    return table


def _shares(mine: Contender, everyone: Sequence[Contender], others: Sequence[str]) -> list[str]:
    cells = []
    for other in others:
        its = next((entry.median for entry in everyone if entry.who == other and entry.lanes == mine.lanes), None)
        median = mine.median
        if mine.who != OURS or its is None or median is None:
            cells += ["", ""]
        else:
            cells += [f"{median.per_s / its.per_s:.2f}", f"{median.per_cpu_s / its.per_cpu_s:.2f}"]
    return cells


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def render(everyone: Sequence[Contender], settings: Mapping[str, Any]) -> list[str]:
    """The report: a title and a table per workload; then rounds, threads, device, and whether the machine was busy."""
    lines = []
    for name in dict.fromkeys(entry.work for entry in everyone):
        lines += [f"{name}: {WORKLOADS[name].what}", *_aligned(rows([one for one in everyone if one.work == name])), ""]
    lines.append(f"median of {settings['rounds']} round{'s' * (settings['rounds'] != 1)}, {settings['threads']} "
                 f"thread{'s' * (settings['threads'] != 1)}, on {settings['device']}")
    lines += [f"{name} is not measured: {why}" for name, why in settings.get("absent", {}).items()]
    load, cores = settings["load"], os.cpu_count() or 1
    if load > 0.25 * cores:  # of other processes, before the first round
        lines.append(f"the machine was busy: a load of {load:g} on {cores} cores before the first round; believe the "
                     "figures per CPU second")
    return lines


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Names left-aligned, numbers right-aligned; a sentence in place of numbers does not widen a column."""
    numeric = [row for row in table if row[2] or row is table[0]]
    widths = [max(len(row[column]) for row in (numeric if column else table)) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = row[1:] if row in numeric else row[1:2]
        text = [cell.rjust(width) if row in numeric else cell for cell, width in zip(cells, widths[1:], strict=False)]
        lines.append("  ".join([f"  {row[0].ljust(widths[0])}", *text]).rstrip())
    return lines


def draw(everyone: Sequence[Contender], path: Path) -> Path | None:
    """Write the plot; None without matplotlib, which is an extra, or without measurements."""
    from qfleet.report.plots import avoid_matplotlib_cache
    from qfleet.runs.atomic_file import atomic_file

    avoid_matplotlib_cache()
    try:
        figure = picture(everyone)
    except ImportError:
        return None
    if figure is None:
        return None
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
    return path


def picture(everyone: Sequence[Contender]) -> Any:
    """A matplotlib Figure of bars, one panel per workload and clock; None without measurements."""
    from matplotlib.figure import Figure

    from qfleet.report.plots import COLOURS

    names = list(dict.fromkeys(entry.work for entry in everyone if entry.median is not None))
    if not names:
        return None
    figure = Figure(figsize=(10, 0.8 + 2.2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 2, squeeze=False)
    whos = list(dict.fromkeys(entry.who for entry in everyone))
    for line, name in zip(panels, names, strict=True):
        shown = [(entry, entry.median) for entry in everyone if entry.work == name and entry.median is not None][::-1]
        for panel, (unit, words) in zip(line, UNITS.items(), strict=True):
            _bars(panel, shown, unit, [COLOURS[whos.index(entry.who) % len(COLOURS)] for entry, _ in shown])
            panel.set_title(f"{name}, {WORKLOADS[name].unit} {words}", fontsize=10, loc="left")
    return figure


def _bars(panel: Any, shown: Sequence[tuple[Contender, Throughput | None]], unit: str, colours: Sequence[str]) -> None:
    """Medians as bars, all rounds as dots."""
    at = range(len(shown))
    panel.barh(at, [getattr(median, unit) for _, median in shown], color=colours, alpha=0.75)
    for y, (entry, _) in zip(at, shown, strict=True):
        panel.plot([getattr(rate, unit) for rate in entry.rounds], [y] * len(entry.rounds), "k.", markersize=4)
    panel.set_yticks(at, [entry.name for entry, _ in shown], fontsize=8)
    panel.set_xlim(left=0)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
