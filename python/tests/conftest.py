"""A model for all tests: the demo that the package carries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import moebius
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def llm(cache: str) -> Iterator[moebius.LLM]:
    with moebius.LLM("demo", quiet=True, cache_dir=cache, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="session")
def python(cache: str) -> Callable[..., subprocess.Popen[str]]:
    """Starts a Python program, whose first argument is the cache. One that hangs is killed."""

    def prepare() -> None:
        signal.alarm(120)
        # Whatever runs in a shell's background begins with it ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def start(program: str | Path, *args: str) -> subprocess.Popen[str]:
        how = [str(program)] if isinstance(program, Path) else ["-c", program]
        command = [sys.executable, *how, cache, *args]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=prepare
        )

    return start
