"""What is installed is what is in the folders: the map in pyproject.toml leaves out a folder without a word."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
DATA = {".yaml", ".json", ".jsonl", ".md"}
NOT_OURS = {"build", "dist", "out"}


def shipped(folder: str) -> set[str]:
    """The files of one folder that belong in the wheel, by their paths there."""
    files = [path for path in (ROOT / folder).iterdir() if path.is_file()]
    return {
        f"headstart/{folder}/{path.name}"
        for path in files
        if path.suffix == ".py" or path.name == "py.typed" or (folder == "recipes" and path.suffix in DATA)
    }


def test_every_package_is_in_the_map() -> None:
    inits = [path.relative_to(ROOT) for path in ROOT.rglob("__init__.py")]
    found = {
        str(path.parent)
        for path in inits
        if not any(part.startswith(".") or part in NOT_OURS for part in path.parts)
        and "site-packages" not in path.parts
    }
    assert found == set(FOLDERS.values())
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {f"headstart.{folder}" for folder in found} == set(FOLDERS)


def test_the_folders_are_flat_and_linked_for_type_checkers() -> None:
    for folder in FOLDERS.values():
        nested = [path.name for path in (ROOT / folder).iterdir() if path.is_dir() and path.name != "__pycache__"]
        assert nested == [], f"setuptools leaves {folder}/{nested} out of the wheel"
        assert (ROOT / ".typecheck" / "headstart" / folder).readlink() == Path(f"../../{folder}")


def test_the_wheel_holds_every_file_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building in place leaves a build/ that leaks into the next wheel
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        entry_points = next(name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "headstart = headstart.scripts.cli:main" in wheel.read(entry_points).decode()
    assert {name for name in names if ".dist-info/" not in name} == set().union(*map(shipped, FOLDERS.values()))
    assert {f"headstart/{folder}/py.typed" for folder in ("heads", "train", "infer")} <= names
    assert "headstart/recipes/ATTRIBUTION.md" in names
