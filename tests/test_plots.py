"""The PNG of a benchmark: what is in its panels, and what is said where there is nothing to draw with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from headstart.infer.figures import PLAIN
from headstart.infer.report import PARTS, Depth
from headstart.scripts.bench_report import content
from headstart.scripts.plots import check_plots, draw
from tests.test_figures import run_of


def found(*decodings: str, tasks: str = "ab") -> Any:
    """The content of a file: the speed-up of "fast" is 2 in task a and 0.5 in task b."""
    split = dict.fromkeys(PARTS, 0.1)
    runs = []
    for decoding in decodings:
        for at, task in enumerate(tasks):
            changes: dict[str, Any] = {"decoding": decoding, "task": task}
            runs.append(run_of(at, PLAIN, 4.0, **changes))
            seconds = {"a": 2.0, "b": 8.0}[task]
            depths = (Depth(4, 4, 3), Depth(4, 3, 1))
            runs.append(run_of(at, "fast", seconds, split=split, depths=depths, **changes))
    protocol = {"suite": "mt_bench", "target": "some/folder", "dtype": "bfloat16", "device": "cpu"}
    made: dict[str, Any] = dict(content(runs, [], protocol, True))
    made["contestants"] = [{"name": name} for name in (PLAIN, "fast")]
    return made


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    kept: list[Figure] = []
    whole = Figure.savefig

    def keep(self: Figure, *args: Any, **kwargs: Any) -> None:
        kept.append(self)
        whole(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def test_the_panels_show_the_figures(tmp_path: Path, figure: list[Figure]) -> None:
    draw(found("greedy", "temperature 1"), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    (drawn,) = figure
    assert len(drawn.axes) == 6 and drawn.get_suptitle() == "folder, mt_bench, bfloat16, cpu"
    speed, depth, split = drawn.axes[:3]
    assert "greedy" in speed.get_title() and "temperature 1" in drawn.axes[3].get_title()
    assert [tick.get_text() for tick in speed.get_xticklabels()] == ["all tasks", "a", "b"]
    assert [bar.get_height() for bar in speed.patches] == [1.25, 2.0, 0.5]  # a ratio below 1 is a bar below the line
    assert any(list(line.get_ydata()) == [1.0, 1.0] for line in speed.get_lines())
    (line,) = depth.get_lines()
    assert list(line.get_ydata()) == [0.75, 0.25]
    assert sum(bar.get_width() for bar in split.patches) == pytest.approx(1.0)
    assert [text.get_text() for text in split.get_legend().get_texts()] == [*PARTS, "other"]


def test_one_task_is_drawn_once(tmp_path: Path, figure: list[Figure]) -> None:
    draw(found("greedy", tasks="a"), tmp_path / "x.png")
    assert [tick.get_text() for tick in figure[0].axes[0].get_xticklabels()] == ["a"]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_plots()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'headstart-llm\[bench\]'.*--no-plots"):
        draw(found("greedy"), tmp_path / "x.png")
