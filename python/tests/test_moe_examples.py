"""The examples of MoE and SGLang run as they stand."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_moe() -> None:
    run = subprocess.run([sys.executable, EXAMPLES / "moe.py"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.rsplit("difference:")[1]) < 0.05


def test_sglang_says_what_it_starts() -> None:
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed: the example would start a server")
    run = subprocess.run(
        [sys.executable, EXAMPLES / "sglang_server.py", "demo"], capture_output=True, text=True, timeout=60
    )
    assert "moebius.sglang:plugin" in run.stdout and "--kt-weight-path demo" in run.stdout
    assert "pip install sglang" in run.stderr
