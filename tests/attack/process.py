"""The process and its surroundings: signals, pipes that are gone or stuck, limits, odd environments, files that are
cut while they are mapped, and
what may lie in a cache folder."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading
import time

from common import FAILURES, FIXTURES, MIB, Server, _before, ask, environment, model_folder, run, together

HEADERS = b"GET /health HTTP/1.1\r\nHo"
LONG = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pipes(area):
    """stderr and stdout that nobody reads, or that are gone."""
    for form in ("text", "json"):
        read, write = os.pipe()
        with area.serve(log=form, stderr=write) as server:
            os.close(write)
            os.close(read)
            replies = together(
                20, lambda i: server.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, timeout=20)
            )
            failed = [r for r in replies if isinstance(r, Exception) or r is None or r.status != 200]
            area.check(f"stderr gone, --log {form}", server.problem() or failed and f"{failed[0]!r}", server.line)
        read, write = os.pipe()
        with area.serve(log=form, stderr=write) as server:
            os.close(write)
            problem = ""
            for i in range(800):  # 64 KiB of log
                try:
                    reply = server.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, timeout=10)
                    problem = reply.status != 200 and f"request {i}: status {reply.status}"
                except FAILURES as failure:
                    problem = f"request {i}: {failure!r}"
                if problem:
                    break
            area.check(f"stderr stuck, --log {form}", problem or server.problem(1.0), server.line)
            os.close(read)
    port = free_port()
    gone = stdout_gone(area, port)
    area.check("stdout gone", gone, f"moebius serve demo --port {port} | true")
    model = model_folder(area, "model")
    for what, command in (
        ("cache build", ["cache", "build", model]),
        ("an error", ["generate", area.dir / "nothing", "x"]),
        ("generate", ["generate", model, "x", "--max-tokens", 2]),
    ):
        for name in ("gone", "closed"):
            read, write = os.pipe()
            os.close(read)
            shutil.rmtree(area.dir / "cache", ignore_errors=True)
            shell = ["sh", "-c", 'exec "$@" 2>&-', "sh"] if name == "closed" else []
            result = run([*shell, *area.command(*command)], stderr=write)
            os.close(write)
            result.err = result.err or "nobody could hear it"
            area.check(f"{what}, stderr {name}", result.problem(), str(result))


def stdout_gone(area, port):
    """A server goes on although nobody reads where it listens."""
    command = area.command("serve", "demo", "--port", port, "--threads", 1, "--log", "off")
    read, write = os.pipe()
    os.close(read)
    child = subprocess.Popen(
        command,
        env=environment(),
        stdout=write,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_before(None, None),
    )
    os.close(write)
    try:
        for _ in range(50):
            time.sleep(0.1)
            if child.poll() is not None:
                return f"it ended with exit code {child.returncode}"
            try:
                if ask(port, "/ready").status == 200:
                    return ""
            except FAILURES:
                pass
        return "it does not answer"
    finally:
        child.kill()
        child.wait()


def signals(area):
    """Ends at once when only half a request is left; all answers whole; SIGHUP ends nothing."""
    with area.serve() as server:
        halves = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        for wire, data in zip(
            halves, (HEADERS, b"", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        ):
            wire.sendall(data)
        time.sleep(0.5)
        start = time.monotonic()
        code = server.stop(signal.SIGTERM)
        took = time.monotonic() - start
        area.check(
            "SIGTERM with half requests",
            (code != 0 or took > 5) and f"exit code {code} after {took:.1f} s",
            server.line,
        )
    with area.serve() as server:
        timer = threading.Timer(0.3, server.process.send_signal, (signal.SIGHUP,))
        timer.start()
        replies = together(16, lambda i: server.ask("/v1/completions", LONG))
        timer.join()
        whole = sum(not isinstance(r, Exception) and r.status == 200 for r in replies)
        area.check("SIGHUP with 16 answers", whole != 16 and f"{whole} of 16 came" or server.problem(), server.line)
    with area.serve() as server:
        thread = threading.Thread(
            target=lambda: together(4, lambda i: server.ask("/v1/completions", {**LONG, "max_tokens": 3500}))
        )
        thread.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        start = time.monotonic()
        server.stop(signal.SIGTERM)
        area.check(
            "a second signal", time.monotonic() - start > 3 and f"took {time.monotonic() - start:.1f} s", server.line
        )
        thread.join()
    with area.serve() as server:
        for _ in range(5):
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(server.pid, signal.SIGCONT)
        for number in (signal.SIGWINCH, signal.SIGPIPE, signal.SIGCHLD, signal.SIGURG):
            os.kill(server.pid, number)
        area.check("stopped, continued, and signals that mean nothing", server.problem(), server.line)


def limits(area):
    """Too little of something: a sentence, and nothing left."""
    model = model_folder(area, "model")
    for size in (0, 1000, 100_000, MIB):
        cache = area.folder("cache")
        read, write = os.pipe()  # the limit holds for the file that its words would go to, too
        result = area.run("cache", "build", model, cache=cache, stderr=write, limits={"RLIMIT_FSIZE": size})
        os.close(write)
        result.err = os.read(read, MIB).decode(errors="replace")
        os.close(read)
        left = [file.name for file in cache.iterdir() if file.suffix in (".partial", ".lock")]
        area.check(
            f"ulimit -f {size} bytes", result.problem() or result.code and left and f"left behind: {left}", str(result)
        )
    for name, values in {
        "RLIMIT_AS": [50 * MIB, 100 * MIB, 200 * MIB, 400 * MIB],
        "RLIMIT_NOFILE": [4, 8, 12, 20, 40],
        "RLIMIT_STACK": [MIB],
        "RLIMIT_DATA": [20 * MIB, 100 * MIB],
        "RLIMIT_MEMLOCK": [0],
        "RLIMIT_NPROC": [1, 8],
    }.items():
        for value in values:
            cache = area.folder("cache")
            result = area.run("generate", model, "Hi", "--max-tokens", 2, cache=cache, limits={name: value})
            # Where the system cannot even start the program, the words are its own, or there are none.
            loader = result.code == 127 and "error while loading" in result.err
            early = result.code == -9 and result.seconds < 0.05 and not result.out + result.err
            area.check(f"{name} {value}", not (loader or early) and result.problem(), str(result))


def environments(area):
    """Odd environments: a sentence, or an answer."""
    model = model_folder(area, "model")
    odd = {
        "no HOME": {"HOME": None},
        "a HOME that is not there": {"HOME": "/nonexistent"},
        "a HOME that is a file": {"HOME": "/etc/passwd"},
        "an empty HOME": {"HOME": ""},
        "a relative HOME": {"HOME": "x/../.."},
        "100,000 rayon threads": {"RAYON_NUM_THREADS": "100000"},
        "words for rayon": {"RAYON_NUM_THREADS": "many"},
        "no rayon threads": {"RAYON_NUM_THREADS": "0"},
        "TMPDIR that is not there": {"TMPDIR": "/nonexistent"},
        "a strange language": {"LANG": "xx_YY.nothing", "LC_ALL": "\x01"},
        "RUST_LOG": {"RUST_LOG": "trace", "RUST_BACKTRACE": "full"},
        "OMP": {"OMP_NUM_THREADS": "100000"},
        "a long variable": {"X": "x" * 100_000},
        "a proxy": {"HTTP_PROXY": "http://127.0.0.1:1", "HTTPS_PROXY": "x"},
        "TERM": {"TERM": "nothing", "COLUMNS": "0"},
        "CUDA": {"CUDA_VISIBLE_DEVICES": "x" * 1000},
        "1,000,000 tokio threads": {"TOKIO_WORKER_THREADS": "1000000"},
    }
    for name, variables in odd.items():
        result = area.run("generate", model, "Hi", "--max-tokens", 2, env=environment(**variables), timeout=40)
        area.check(name, result.problem(20, codes=(0,)), str(result))
        try:
            with Server(area, env=environment(**variables), wait=40) as server:
                area.check(
                    f"{name}, served",
                    server.problem() or server.status("Threads") > 200 and f"{server.status('Threads')} threads",
                    server.line,
                )
        except (RuntimeError, AttributeError) as failure:
            area.check(f"{name}, served", str(failure))


def cut_files(area):
    """Files that become shorter while they are mapped."""
    for experts in ("map", "copy"):
        cache = area.folder("cache")
        with area.serve("--experts-memory", experts, cache=cache) as server:
            server.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
            file = next(cache.rglob("*.moebius"))
            with open(file, "r+b") as handle:
                handle.truncate(8192)
            try:
                server.ask("/v1/completions", {"prompt": "The sea is large and", "max_tokens": 20})
            except FAILURES:
                pass
            time.sleep(0.5)
            code = server.process.poll()
            words = server.log.read_text(errors="replace")
            problem = server.end() if code is not None and (code < 0 or file.name not in words) else ""
            area.check(
                f"the cache is cut under a server, --experts-memory {experts}", problem, f"{server.line}\n{words}"
            )
    model = model_folder(area, "model", FIXTURES / "qwen3_moe")
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    for at in (0, 100, len(data) // 2):
        weights.write_bytes(data)
        timer = threading.Timer(area.random.random() * 0.2, os.truncate, (weights, at))
        timer.start()
        result = area.run("generate", model, "Hi", "--max-tokens", 50, cache=area.folder("cache"))
        timer.join()
        area.check("weights are cut while they are loaded", result.problem(), str(result))


def cache_folder(area):
    """What else may lie where the cache file is to be."""
    model = model_folder(area, "model")
    area.run("cache", "build", model, cache=area.folder("cache"))
    name = next((area.dir / "cache").glob("*.moebius")).name
    key = name.rsplit("-model-", 1)[-1].rsplit(".", 1)[0] if "-model-" in name else name.rsplit(".", 1)[0]
    places = [
        name,
        f"{key}.partial",
        f"{key}.lock",
        "x.moebius",
        "x.partial",
        "x.lock",
        name.replace(".moebius", ".sources.json"),
    ]
    makers = {
        "a pipe": os.mkfifo,
        "a folder": os.mkdir,
        "a link to itself": lambda path: os.symlink(path, path),
        "a link to nothing": lambda path: os.symlink("/nonexistent/x", path),
        "a link to /dev/zero": lambda path: os.symlink("/dev/zero", path),
        "an empty file": lambda path: pathlib.Path(path).touch(),
        "a file of others": lambda path: pathlib.Path(path).write_bytes(b"what somebody needs" * 1000),
    }
    for place in places:
        for what, make in makers.items():
            cache = area.folder("cache")
            make(cache / place)
            result = area.run("generate", model, "Hi", "--max-tokens", 2, cache=cache, timeout=20)
            named = place in result.err or str(cache) in result.err
            problem = (
                result.problem(15)
                or result.code
                and not named
                and f"a sentence without the path: {result.err.strip()[-200:]}"
            )
            area.check(f"{what} at {place.replace(key, 'KEY')}", problem, str(result))
    cache = area.folder("cache")
    shutil.rmtree(cache)
    for what, make in makers.items():
        make(cache)
        result = area.run("generate", model, "Hi", "--max-tokens", 2, cache=cache, timeout=20)
        area.check(f"the cache folder is {what}", result.problem(15), str(result))
        shutil.rmtree(cache) if cache.is_dir() and not cache.is_symlink() else cache.unlink()


def attack(area):
    parts = [pipes, signals, limits, environments, cut_files, cache_folder]
    for part in parts:
        part(area)
    while area.time():
        area.random.choice([signals, limits, cut_files])(area)
