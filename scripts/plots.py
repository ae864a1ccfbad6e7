"""A benchmark as a picture: speed-up per task, acceptance by depth, and where the time of our calls goes."""

import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.scripts.journal import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = (18.0, 4.6)  # of a row of three panels, one row a decoding
DOTS = 110  # an inch
LONGEST = 22  # characters of a label


def check_plots() -> None:
    """Raises ImportError, naming the extra, where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "the PNG of a benchmark needs matplotlib, which is not installed: pip install 'headstart-llm[bench]', or "
            "leave the picture out with --no-plots"
        )


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draws the content of a benchmark's file (``Saved`` in infer/figures.py) into ``path``, a PNG, whole or not at
    all. It must hold figures of one decoding or more."""
    check_plots()
    from matplotlib.figure import Figure

    decodings = list(found["figures"])
    figure = Figure(figsize=(INCHES[0], INCHES[1] * len(decodings)), layout="constrained")
    panels = figure.subplots(len(decodings), 3, squeeze=False, width_ratios=[1.6, 1.0, 1.2])
    colours = {one["name"]: f"C{i % 10}" for i, one in enumerate(found["contestants"])}
    for (speed, depth, split), decoding in zip(panels, decodings, strict=True):
        of = found["figures"][decoding]
        _speedups(speed, of, colours, decoding)
        _depths(depth, of, colours)
        _splits(split, of)
    asked = found["protocol"]
    figure.suptitle(
        f"{Path(str(asked.get('target'))).name}, {asked.get('suite')}, {asked.get('dtype')}, {asked.get('device')}"
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS)
    write_whole(path, drawn.getvalue())


def _speedups(axes: "Axes", of: Mapping[str, Any], colours: Mapping[str, str], decoding: str) -> None:
    """Bars by task with their interval, for everything but plain generate, which is the line at 1."""
    from headstart.infer.figures import PLAIN

    names = [name for name in of if name != PLAIN]
    tasks = list(dict.fromkeys(task for name in names for task in of[name]))
    tasks = tasks[1:] if len(tasks) == 2 else tasks  # one task: all of them are the same
    wide = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        at = [t for t, task in enumerate(tasks) if task in of[name]]
        bars = [of[name][tasks[t]] for t in at]
        heights = [one["speedup"] for one in bars]
        below = [one["speedup"] - one["low"] for one in bars]
        above = [one["high"] - one["speedup"] for one in bars]
        places = [t + (i - (len(names) - 1) / 2) * wide for t in at]
        whiskers = {"elinewidth": 0.8, "ecolor": "0.3"}
        axes.bar(places, heights, wide, yerr=[below, above], color=colours[name], label=name, error_kw=whiskers)
    axes.axhline(1.0, color="0.2", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(tasks)), [_short(task) for task in tasks], rotation=20, ha="right")
    tallest = max((one["high"] for name in names for one in of[name].values()), default=1.0)
    axes.set(title=f"{decoding}: speed-up over plain generate", ylabel="times", ylim=(0, 1.35 * max(tallest, 1.0)))
    if names:
        axes.legend(fontsize="small", ncols=2, loc="upper left")


def _depths(axes: "Axes", of: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Of the passes that offered a guess at a depth, the share that kept it."""
    from headstart.infer.figures import ALL

    deepest = 1
    for name, scopes in of.items():
        shares = scopes[ALL]["accepted_by_depth"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", color=colours[name], label=name)
            deepest = max(deepest, len(shares))
    axes.set(title="acceptance by depth", xlabel="depth", ylabel="share kept", ylim=(0, 1.02))
    axes.set_xticks(range(1, deepest + 1))
    if axes.get_lines():
        axes.legend(fontsize="small")


def _splits(axes: "Axes", of: Mapping[str, Any]) -> None:
    """Shares of the wall time of ours, a bar each."""
    from headstart.infer.figures import ALL

    shares = {name: scopes[ALL]["split"] for name, scopes in of.items() if scopes[ALL]["split"]}
    parts = list(next(iter(shares.values()), []))
    left = [0.0] * len(shares)
    for part in parts:
        values = [own[part] for own in shares.values()]
        axes.barh(range(len(shares)), values, left=left, label=part, color=f"C{parts.index(part)}", alpha=0.55)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(shares)), [_short(name) for name in shares])
    axes.invert_yaxis()
    axes.set(title="where the time goes", xlabel="share of wall time")
    if shares:
        axes.legend(fontsize="small", ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
