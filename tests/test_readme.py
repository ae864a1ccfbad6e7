"""README.md is run. A fenced block is run if the line before it is `<!-- tested -->`; a bash block that would take too
long says `<!-- long -->` there, and one of the two must stand. Blocks run in order, in one empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
RUN = {"bash": ["bash", "-e", "-u", "-o", "pipefail", "-c"], "python": [sys.executable, "-c"]}
SECONDS = 300  # a block


class Block(NamedTuple):
    line: int  # of the opening fence, from 1
    language: str
    mark: str  # "tested", "long" or ""
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, with the mark on the line above each."""
    lines = text.splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, "a fence is not closed"
    found = []
    for opening, closing in zip(fences[::2], fences[1::2], strict=True):
        above = re.fullmatch(r"<!-- (tested|long) -->", lines[opening - 1]) if opening else None
        language, inside = lines[opening].removeprefix("```").strip(), "\n".join(lines[opening + 1 : closing])
        found.append(Block(opening + 1, language, above[1] if above else "", inside))
    return found


def run(block: Block, folder: Path) -> str:
    """What went wrong when `block` ran in `folder`; "" if nothing did."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [*RUN[block.language], block.text]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode == 0:
        return ""
    return f"README.md line {block.line} ended with {done.returncode}:\n{block.text}\n{done.stdout}{done.stderr}"


def test_every_bash_block_is_tested_or_long() -> None:
    unmarked = [block.line for block in blocks(README.read_text()) if block.language == "bash" and not block.mark]
    assert unmarked == [], "put <!-- tested --> or <!-- long --> on the line before"


@pytest.mark.embedded
def test_the_tested_blocks_run(tmp_path: Path) -> None:
    for block in blocks(README.read_text()):
        if block.mark == "tested":
            assert run(block, tmp_path) == ""


SAMPLE = """# Title
<!-- tested -->
```bash
echo made > file
```

```text
no command
```
<!-- long -->
```bash
sleep 9999
```
```bash
false
```
"""


def test_the_marks_are_read(tmp_path: Path) -> None:
    found = blocks(SAMPLE)
    assert [(block.line, block.language, block.mark) for block in found] == [
        (3, "bash", "tested"),
        (7, "text", ""),
        (11, "bash", "long"),
        (14, "bash", ""),
    ]
    assert run(found[0], tmp_path) == ""
    assert (tmp_path / "file").read_text() == "made\n"
    assert "line 14 ended with 1" in run(found[3], tmp_path)
