"""The package as it is installed is typed, and what its stubs say of the extension module is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    "check",
    [
        ["mypy", "--strict", "--python-version=3.10", "-p", "moebius"],
        ["mypy", "--strict", str(ROOT / "python/tests"), str(ROOT / "python/examples")],
        ["mypy.stubtest", "moebius._moebius"],
    ],
)
def test_types(check: list[str], tmp_path: Path) -> None:
    # From an empty folder: beside the sources, these would be imported.
    said = subprocess.run([sys.executable, "-m", *check], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
