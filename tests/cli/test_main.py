"""The command picks one subcommand and turns what users get wrong into one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert COMMANDS
    for name, what in COMMANDS.items():
        assert name in shown
        assert what in shown


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "agentrl: no command 'trian'; did you mean `train`?\n"


@pytest.mark.parametrize("flags", [["--gpu-file"], ["calibrate"]])
def test_a_folder_or_nothing_in_a_files_place_is_one_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        assert main(["plan", *flags, str(path)]) == 2
        assert capsys.readouterr().err == f"agentrl plan: {path}: {reason}\n"


@pytest.mark.parametrize("args", [["--help"], ["--version"], [], ["eval", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(args: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *args],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", 1)
