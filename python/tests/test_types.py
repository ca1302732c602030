"""The package is typed, and what it says of the extension module is so."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT

PYTHON = ROOT / "python"


def run(*args: str) -> str:
    said = subprocess.run([sys.executable, *args], cwd=PYTHON, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


def test_mypy() -> None:
    run("-m", "mypy", "--strict", "--python-version=3.10", "-p", "moebius")
    run("-m", "mypy", "--strict", "examples", "tests")


def test_stubs_are_what_the_module_has() -> None:
    run("-m", "mypy.stubtest", "moebius._moebius", "--ignore-missing-stub")
