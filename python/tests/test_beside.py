"""What goes on beside an answer: other threads, tasks, signals, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import moebius
import pytest
from moebius import LLM, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Start = Callable[..., "subprocess.Popen[str]"]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_other_threads_run_meanwhile(llm: LLM) -> None:
    ended, counted = threading.Event(), 0

    def count() -> None:
        nonlocal counted
        while not ended.wait(0.001):
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    start = time.monotonic()
    llm.generate(["What is"] * 4, LONG)
    took = time.monotonic() - start
    ended.set()
    thread.join()
    assert counted > 20 * took, f"{counted} turns in {took:.2f} s"


def test_threads_share_an_engine(llm: LLM) -> None:
    alone = llm.generate("What is", SHORT).text
    said: list[str] = []
    workers = [threading.Thread(target=lambda: said.append(llm.generate("What is", SHORT).text)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert said == [alone] * 8


def test_async(llm: LLM) -> None:
    async def stream() -> str:
        return "".join([str(chunk) async for chunk in llm.stream("What is", SHORT)])

    async def all() -> None:
        whole = await llm.agenerate("What is", SHORT)
        assert whole == llm.generate("What is", SHORT) or whole.text == llm.generate("What is", SHORT).text
        assert await asyncio.gather(*(stream() for _ in range(20))) == [whole.text] * 20
        batch = await llm.agenerate(["What is", "x"], SHORT)
        assert batch[0].text == whole.text and len(batch) == 2
        chat = await llm.achat([{"role": "user", "content": "What is 2+2?"}], SHORT)
        assert chat.text == llm.chat([{"role": "user", "content": "What is 2+2?"}], SHORT).text

    asyncio.run(all())


def test_the_loop_runs_meanwhile_and_a_cancelled_task_cancels_its_request(llm: LLM) -> None:
    async def all() -> None:
        task = asyncio.create_task(llm.agenerate("What is", SamplingParams(max_tokens=None, ignore_eos=True)))
        turns = 0
        while turns < 20:
            await asyncio.sleep(0.002)
            turns += 1
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    files = len(os.listdir("/proc/self/fd"))
    asyncio.run(all())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files


def test_closing_frees_the_engine(cache: str) -> None:
    for _ in range(2):
        before = threads()
        llm = LLM("demo", quiet=True, cache_dir=cache, device="cpu")
        assert threads() > before
        llm.close()
        assert threads() <= before + 1, "its thread and team are gone"
    llm = LLM("demo", quiet=True, cache_dir=cache, device="cpu")
    llm.generate("x", SHORT)
    del llm
    gc.collect()
    until = time.monotonic() + 10
    while threads() > before + 1:
        assert time.monotonic() < until, "what was dropped is freed"
        time.sleep(0.01)


INTERRUPTED = """
import sys, time, moebius
llm = moebius.LLM("demo", quiet=True, cache_dir=sys.argv[1], device="cpu")
forever = moebius.SamplingParams(max_tokens=None, ignore_eos=True)
prompts = ["What is"] * 64
print("running")
start = time.monotonic()
try:
    while True:
        llm.generate(prompts, forever)
except KeyboardInterrupt:
    print("interrupted")
start = time.monotonic()
llm.generate("x", moebius.SamplingParams(max_tokens=1))
print("alone" if time.monotonic() - start < 1 else "others still run")
"""


def test_ctrl_c_interrupts_and_cancels(python: Start) -> None:
    with python(INTERRUPTED) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert process.stdout.readline() == "interrupted\n"
        took = time.monotonic() - start
        assert process.stdout.readline() == "alone\n"
        assert process.wait(20) == 0
        assert took < 1, f"it took {took:.3f} s"


FORKED = """
import os, sys, moebius
llm = moebius.LLM("demo", quiet=True, cache_dir=sys.argv[1], device="cpu")
stream = llm.stream("x", moebius.SamplingParams(max_tokens=50, ignore_eos=True))
child = os.fork()
if child == 0:
    said = []
    for use in (lambda: llm.generate("x"), lambda: next(stream), lambda: moebius.LLM("demo", quiet=True,
    cache_dir=sys.argv[1])):
        try:
            use()
        except moebius.Error as error:
            said.append(str(error))
    del llm, stream, use
    os._exit(0 if len(said) == 3 and all("fork" in text for text in said) else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), len(stream.finish().token_ids))
"""

FORKED_FIRST = """
import os, sys, moebius
child = os.fork()
with moebius.LLM("demo", quiet=True, cache_dir=sys.argv[1], device="cpu") as llm:
    text = llm.generate("x", moebius.SamplingParams(temperature=0, max_tokens=3)).text
if child == 0:
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(("program", "said"), [(FORKED, "0 50\n"), (FORKED_FIRST, "0\n")])
def test_a_fork_is_told(python: Start, program: str, said: str) -> None:
    with python(program) as process:
        out, err = process.communicate(timeout=60)
    assert out == said, err


def test_loading_is_said_unless_quiet(python: Start) -> None:
    for quiet in (True, False):
        program = (
            f"import sys, moebius\nmoebius.LLM('demo', quiet={quiet}, cache_dir=sys.argv[1], device='cpu').close()"
        )
        with python(program) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert not (quiet and err), err
