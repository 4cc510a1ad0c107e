"""What counts as a change to the disk, or as a program, after the last update."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = """\
import os, shutil, subprocess, sys, threading, types
from accumlint.runtime.disk import watch_changes

class Armed:
    armed, thread, settings = True, threading.get_ident(), types.SimpleNamespace(folder="{own}")
    def passing(self):
        self.armed = False
        print("stopped", flush=True)
        os._exit(0)

open("there", "w").close()
os.mkdir("folder")
watch_changes(Armed())
{action}
print("went on", flush=True)
os._exit(0)
"""
STOPS = [
    "open('new', 'w')",
    "open('there', 'a')",
    "open('there', 'r+b')",
    "os.open('new', os.O_WRONLY | os.O_CREAT)",
    "import pathlib; pathlib.Path('new').write_text('x')",
    "os.remove('there')",
    "os.rename('there', 'elsewhere')",
    "os.makedirs('a/b')",
    "shutil.rmtree('folder')",
    "shutil.copy('there', 'copy')",
    "subprocess.run(['true'])",
    "os.system('true')",
]
GOES_ON = [
    "open('there').read()",
    "open(os.devnull, 'w').write('x')",
    "open('{own}/report', 'w')",
    "os.write(1, b'')",
    "r, w = os.pipe(); os.fdopen(w, 'w').write('x')",
    "t = threading.Thread(target=lambda: open('log', 'w').close()); t.start(); t.join()",
    "os.makedirs('__pycache__'); open('__pycache__/x.pyc', 'wb')",
    "os.listdir('.'); os.stat('there')",
]


def ran(folder: Path, action: str) -> str:
    with tempfile.TemporaryDirectory() as own:
        script = SCRIPT.replace("{action}", action).replace("{own}", own)
        return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("action", STOPS)
def test_a_change_ends_the_run_before_it_happens(tmp_path: Path, action: str) -> None:
    assert ran(tmp_path, action) == "stopped"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "there"]


@pytest.mark.parametrize("action", GOES_ON)
def test_what_changes_nothing_of_the_user_goes_on(tmp_path: Path, action: str) -> None:
    assert ran(tmp_path, action) == "went on"
