"""The command line: what it lists, how it fails, and that it answers before torch is loaded."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.scripts import cli

COMMANDS = ["distill", "inspect", "train", "generate", "bench", "tune", "doctor", "push"]


def test_version_names_what_is_installed_without_loading_it() -> None:
    code = (
        "import sys; from headstart.scripts import cli; sys.argv = ['headstart', '--version']\n"
        "try: cli.main()\n"
        "finally: print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version, loaded = done.stdout.splitlines()
    assert version.startswith("headstart 0.")
    assert "(torch 2." in version
    assert ", transformers 5." in version
    assert loaded == "[]"


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).parent / "headstart"
    done = subprocess.run([command, "no-such-command"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-command" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_command() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    assert [command for command in COMMANDS if command not in shown.output] == []
    for command in COMMANDS:
        assert CliRunner().invoke(cli.app, [command, "--help"]).exit_code == 0


def test_train_hands_on_its_arguments_and_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    fake = types.ModuleType("headstart.train.__main__")
    fake.main = lambda argv: given.append(argv) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headstart.train.__main__", fake)
    done = CliRunner().invoke(cli.app, ["train", "a.yaml", "steps=3", "data.path=x y"])
    assert given == [["a.yaml", "steps=3", "data.path=x y"]]
    assert done.exit_code == 3


def test_train_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headstart.train.__main__", raising=False)
    monkeypatch.setattr("sys.meta_path", [NoAccelerate(), *sys.meta_path])
    done = CliRunner().invoke(cli.app, ["train", "a.yaml"])
    assert isinstance(done.exception, ImportError)
    assert "pip install 'headstart-llm[train]'" in str(done.exception)


class NoAccelerate:
    """A finder that knows the training command needs accelerate, and has none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "headstart.train.__main__":
            raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")


@pytest.mark.parametrize("error", [ValueError("given 3, expected 4"), OSError("no such file"), ImportError("pip it")])
def test_an_error_of_the_user_is_one_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    monkeypatch.setattr(cli, "app", fails_with(error))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"headstart: {error}\n(HEADSTART_DEBUG=1 shows where this comes from)\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    monkeypatch.setattr(cli, "app", fails_with(ValueError("given 3")))
    with pytest.raises(ValueError, match="given 3"):
        cli.main()


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    monkeypatch.setattr(cli, "app", fails_with(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_a_wrong_recipe_is_told_before_processes_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.train.launch.launch", lambda *_: pytest.fail("processes were started"))
    result = CliRunner().invoke(cli.app, ["train", str(tmp_path / "absent.yaml"), "--num-processes", "2"])
    assert isinstance(result.exception, ValueError) and "no recipe at" in str(result.exception)


def fails_with(error: Exception) -> object:
    def app() -> None:
        raise error

    return app
