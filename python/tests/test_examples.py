"""Examples and the documentation's code run, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def run(program: Path, folder: Path) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    said = subprocess.run(
        [sys.executable, str(program)], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 0, said.stderr
    return said.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chat", ["Paris", "choice: Paris", "json: {"]),
        ("capture_and_steer", ["captured [(9, ", "0.0 2 + 2 = 4", "layer 0: moved by 0.00"]),
        ("batch", ["40 prompts: 1280 tokens", "tasks say the same: True"]),
    ],
)
def test_example(name: str, said: list[str], tmp_path: Path) -> None:
    out = run(ROOT / "python/examples" / f"{name}.py", tmp_path)
    for text in said:
        assert text in out, out


@pytest.mark.parametrize("page", ["README.md", "python/README.md", "docs/python.md"])
def test_code_of_a_page(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks, "it has code"
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    run(program, tmp_path)
