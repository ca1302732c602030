"""What all areas share: processes under a memory limit, a server and questions to it, and a record of what was tried
and what broke."""

import ctypes
import http.client
import json
import os
import pathlib
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "target" / "attack"
FIXTURES = ROOT / "tests" / "fixtures"
DEMO = ROOT / "demo" / "moe-gqa"
MIB = 1 << 20
GIB = 1 << 30

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1

LIMIT_BYTES = 6 * GIB  # of every process that is attacked, so that the machine outlives what it finds


class Area:
    """One area of the attack: its random numbers, its time, and what it found."""

    def __init__(self, name, binary, seed, seconds):
        self.name, self.binary, self.seed = name, binary, seed
        self.random = random.Random(f"{seed}/{name}")
        self.deadline = time.monotonic() + seconds
        self.seconds = seconds
        self.dir = OUT / "work" / name
        shutil.rmtree(self.dir, ignore_errors=True)
        self.dir.mkdir(parents=True)
        self.tried, self.broken, self.notes = 0, [], []

    def time(self):
        """Whether there is time for another round."""
        return time.monotonic() < self.deadline

    def note(self, text):
        """Says a number or what was left out; it is in the table, too."""
        self.notes.append(text)
        print(f"    {text}", flush=True)

    def check(self, what, problem, reproduction="", keep=None):
        """Counts one thing that was tried. `problem`: what broke, or nothing. `keep`: a file or folder that brings it
        about."""
        self.tried += 1
        what = what.replace("\n", "\\n")
        if not problem:
            return True
        number = len(self.broken) + 1
        path = OUT / "broke" / f"{self.name}-{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = ""
        if keep and number <= 20:
            kept = path.with_suffix("")
            (shutil.copytree if pathlib.Path(keep).is_dir() else shutil.copyfile)(keep, kept)
        again = f"make attack ONLY={self.name} SEED={self.seed}"
        path.write_text(
            f"{what}\n{problem}\n\nseed: {self.seed}\nagain: {again}\nkept: {kept}\n\n{reproduction}\n",
            errors="replace",
        )
        self.broken.append((f"{what}: {problem}", path))
        print(f"    BROKE {what}: {problem}\n          {path.relative_to(ROOT)}", flush=True)
        return False

    def folder(self, name):
        """A new empty folder."""
        path = self.dir / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def command(self, *args, cache=None):
        """The command line of `moebius ARGS`; all but hub models on the CPU, with the area's own cache."""
        where = ["--cache-dir", str(cache or self.dir / "cache")]
        device = [] if args[0] == "cache" else ["--device", "cpu"]
        return [str(self.binary), *map(str, args), *where, *device]

    def run(self, *args, cache=None, **options):
        """Runs `moebius ARGS` to its end."""
        return run(self.command(*args, cache=cache), **options)

    def serve(self, *args, **options):
        """A server of the area's own."""
        return Server(self, *args, **options)


def environment(**more):
    """A small environment with a home of its own; a value of None leaves one out."""
    home = OUT / "home"
    home.mkdir(parents=True, exist_ok=True)
    own = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "HF_ENDPOINT": "http://127.0.0.1:1",
        **more,
    }
    return {name: str(value) for name, value in own.items() if value is not None}


class Group:
    """A control group with a memory limit, of version 1 or 2; `made` is false where this machine lets us have none."""

    count = 0

    def __init__(self, limit_bytes):
        Group.count += 1
        name = f"moebius-attack-{os.getpid()}-{Group.count}"
        root = pathlib.Path("/sys/fs/cgroup")
        first = (root / "memory").is_dir()
        self.path = (root / "memory" if first else root) / name
        self.made = False
        try:
            self.path.mkdir()
            (self.path / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit_bytes))
            self.made = True
        except OSError:
            self.remove()
            return
        swap = self.path / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(limit_bytes if first else 0))

    def enter(self):
        """Takes the calling process in."""
        (self.path / "cgroup.procs").write_text("0")

    def remove(self):
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)


_shared_group = None


def _shared():
    global _shared_group
    if _shared_group is None:
        _shared_group = Group(LIMIT_BYTES)
    return _shared_group


def remove_groups():
    if _shared_group:
        _shared_group.remove()


def _before(group, limits):
    """What a process does before it becomes the program: into its group, or under a limit of its address space."""
    group = group or _shared()

    def act():
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing outlives the attack
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if group.made:
            group.enter()
        else:
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        for name, value in (limits or {}).items():
            resource.setrlimit(getattr(resource, name), (value, value))

    return act


class Result:
    """How a process ended: `code` (below 0: by this signal; None: it was killed for its time), what it said, what it
    took."""

    def __init__(self, command, code, out, err, seconds, rss_mb):
        self.command, self.code, self.out, self.err = command, code, out, err
        self.seconds, self.rss_mb = seconds, rss_mb

    def __str__(self):
        end = "out of time" if self.code is None else f"exit {self.code}"
        head = f"$ {self.command}\n{end}, {self.seconds:.1f} s, {self.rss_mb} MiB"
        return f"{head}\nstdout: {self.out[:2000]}\nstderr: {self.err[:4000]}"

    def problem(self, seconds=30, rss_mb=2048, codes=(0, 1, 2)):
        """What is wrong with this end; nothing if it is an answer, or a refusal in words."""
        if self.code is None:
            return f"hung for {self.seconds:.0f} s"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        if self.code == 101 or "panicked at" in self.err or "please report" in self.err:
            place = re.search(r"panicked at \S*?([^/]+/[^/\s]+:\d+)", self.err)
            return "panicked" + (f" at {place[1]}" if place else "")
        if self.code not in codes:
            return f"exit code {self.code}"
        if self.code and not self.err.strip():
            return f"exit code {self.code} without a word"
        if self.seconds > seconds:
            return f"took {self.seconds:.0f} s"
        if self.rss_mb > rss_mb:
            return f"took {self.rss_mb} MiB"
        longest = max(map(len, self.err.split("\n")))
        return f"an error line of {longest} characters" if longest > 2000 else ""


def run(command, timeout=30, env=None, limits=None, stdin=None, stdout=None, stderr=None, group=None, kill_after=None):
    """Runs a command to its end. `kill_after`: SIGKILL after so many seconds, as if the power were gone for it."""
    env = environment() if env is None else env
    line = " ".join([f"{k}={shlex.quote(v)}" for k, v in env.items() if k != "PATH"] + [shlex.join(command)])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        child = subprocess.Popen(
            command,
            env=env,
            stdin=stdin or subprocess.DEVNULL,
            stdout=stdout or out,
            stderr=stderr or err,
            start_new_session=True,
            preexec_fn=_before(group, limits),
        )
        end = start + (timeout if kill_after is None else kill_after)
        late, pause = False, 0.002
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() >= end and not late:
                late = True
                os.killpg(child.pid, signal.SIGKILL)
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        seconds = time.monotonic() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(MIB).decode(errors="replace"))
        code = None if late and kill_after is None else child.returncode
        return Result(line, code, *texts, seconds, usage.ru_maxrss >> 10)


class Reply:
    """What a server said."""

    def __init__(self, status, headers, body, seconds):
        self.status, self.headers, self.body, self.seconds = status, headers, body, seconds

    def json(self):
        return json.loads(self.body)


# What a question may end with when there is no answer.
FAILURES = (OSError, http.client.HTTPException)


def ask(port, path, body=None, method=None, headers=None, timeout=60, source="127.0.0.1"):
    """Asks once, on a connection of its own."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout, source_address=(source, 0))
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            method or ("GET" if body is None else "POST"),
            path,
            data,
            {"content-type": "application/json", **(headers or {})},
        )
        answer = connection.getresponse()
        return Reply(answer.status, answer.headers, answer.read(), time.monotonic() - start)
    finally:
        connection.close()


def together(count, work, timeout=300):
    """Calls `work(i)` on `count` threads at once and gives what each returned, or the failure it ended with."""
    results = [None] * count

    def one(i):
        try:
            results[i] = work(i)
        except FAILURES as failure:
            results[i] = failure

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return results


class Server:
    """`moebius serve` on a port of its own."""

    def __init__(
        self,
        area,
        *args,
        model="demo",
        cache=None,
        env=None,
        group=None,
        limits=None,
        log="off",
        stderr=None,
        threads=1,
        wait=60,
    ):
        command = area.command("serve", model, "--port", "0", "--log", log, "--threads", threads, *args, cache=cache)
        self.line = shlex.join(command)
        self.log = area.dir / f"server-{area.tried}-{time.monotonic_ns()}.log"
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                env=env or environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr or file,
                start_new_session=True,
                preexec_fn=_before(group, limits),
            )
        self.pid = self.process.pid
        timer = threading.Timer(wait, self.process.kill)
        timer.start()
        words = self.process.stdout.readline().decode()
        timer.cancel()
        found = re.search(r"http://[^/ ]*:(\d+)", words)
        if not found:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"no server: {words!r} {self.log.read_text(errors='replace')[-500:]}")
        self.port = int(found[1])
        self.wait_ready(wait)

    def wait_ready(self, seconds):
        """It listens before its model is there."""
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            try:
                if self.ask("/ready", timeout=5).status == 200:
                    return
            except FAILURES:
                pass
            time.sleep(0.02)
        self.stop()
        raise RuntimeError(f"it is not ready: {self.log.read_text(errors='replace')[-500:]}")

    def ask(self, path, body=None, **options):
        return ask(self.port, path, body, **options)

    def alive(self):
        return self.process.poll() is None

    def status(self, field):
        """A number of /proc/PID/status."""
        text = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(rf"^{field}:\s+(\d+)", text, re.M)[1])

    def rss_mb(self):
        return self.status("VmRSS") >> 10

    def peak_mb(self):
        return self.status("VmHWM") >> 10

    def cpu_s(self):
        """Seconds of a core that it has taken so far."""
        fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def metric(self, name):
        text = self.ask("/metrics").body.decode()
        return float(re.search(rf"^moebius_{name} (\S+)", text, re.M)[1])

    def problem(self, seconds=2.0):
        """What is wrong with it now: gone, or /health late."""
        if not self.alive():
            return self.end()
        try:
            reply = self.ask("/health", timeout=20)
        except FAILURES as failure:
            return self.end() or f"/health: {failure!r}"
        return (
            ""
            if reply.status == 200 and reply.seconds < seconds
            else f"/health: {reply.status} after {reply.seconds:.1f} s"
        )

    def end(self):
        """How it ended, if it did."""
        try:
            code = self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            return ""
        return (
            f"the server ended by {signal.Signals(-code).name}"
            if code < 0
            else f"the server ended with exit code {code}"
        )

    def stop(self, with_signal=signal.SIGKILL, timeout=60):
        """Ends it; gives its exit code, or None if it had to be killed."""
        code = None
        if self.alive():
            self.process.send_signal(with_signal)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16, **more}


def model_folder(area, name, source=FIXTURES / "qwen3_moe", **files):
    """A copy of a checkpoint; `files` replace those of the same name."""
    path = area.folder(name)
    for file in source.iterdir():
        if not file.name.startswith("reference") and file.is_file():
            (path / file.name).symlink_to(file.resolve())
    for file, content in files.items():
        target = path / file
        target.unlink(missing_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
