"""200 clients at once: every answer is the one that was given alone, nothing is left of those who misbehave, and
/health stays quick."""

import collections
import json
import multiprocessing
import random
import socket
import threading
import time

from common import FAILURES, ROOT, ask, together

CLIENTS, PROCESSES = 200, 4
GROWTH_MB = 100
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
NONSENSE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"messages": 3}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": [1e9]}',
    b'{"prompt": "a", "model": "nobody"}',
    b"\xff\xfe",
    b'{"prompt": "a", "colour": 1}',
    b'{"messages": []}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}',
    b'{"prompt": "a", "n": 1000}',
    b"[" * 1000,
]


def body_of(path, question):
    text = {"max_tokens": 24, "temperature": 0}
    user = [{"role": "user", "content": question}]
    return {
        "/v1/completions": {"prompt": question, **text},
        "/v1/responses": {"input": question, "max_output_tokens": 24, "temperature": 0},
    }.get(path, {"messages": user, **text})


def said(path, told):
    """The text of an answer."""
    if path == PATHS[0]:
        return told["choices"][0]["message"]["content"]
    if path == PATHS[1]:
        return told["choices"][0]["text"]
    return told["content"][0]["text"] if path == PATHS[2] else told["output"][0]["content"][0]["text"]


def streamed(path, body):
    """The text of a stream."""
    text = ""
    for line in body.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        if path in PATHS[:2]:
            choice = (event["choices"] or [{}])[0]
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
        elif event["type"] == "response.output_text.delta":
            text += event["delta"]
    return text


def head(path, length):
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode()


class Client:
    """One client: does one thing after the other, by chance."""

    def __init__(self, port, cases, seed, counts, wrong):
        self.port, self.cases, self.random, self.counts, self.wrong = port, cases, random.Random(seed), counts, wrong

    def run(self, until):
        acts = (
            [self.whole] * 6
            + [self.stream] * 6
            + [self.nonsense] * 3
            + [self.too_long, self.leave, self.leave, self.unread, self.half, self.huge, self.capture]
        )
        while time.monotonic() < until:
            act = self.random.choice(acts)
            try:
                act()
            except FAILURES as failure:
                self.counts[f"{act.__name__}: {type(failure).__name__}"] += 1

    def post(self, path, body):
        reply = ask(self.port, path, body, timeout=120)
        self.counts[f"status {reply.status}"] += 1
        if reply.status == 429 and not reply.headers.get("retry-after"):
            self.wrong.append(("429 without Retry-After", path, str(body)[:300]))
        if reply.status >= 500:
            self.wrong.append(
                (f"status {reply.status}", path, str(body)[:300], reply.body[:300].decode(errors="replace"))
            )
        return reply

    def compare(self, path, body, answer, text):
        self.counts["right" if text == answer else "wrong"] += 1
        if text != answer:
            self.wrong.append(
                ("another answer than alone", path, json.dumps(body), f"alone: {answer!r}", f"now: {text!r}")
            )

    def whole(self):
        path, body, answer = self.random.choice(self.cases)
        reply = self.post(path, body)
        if reply.status == 200:
            self.compare(path, body, answer, said(path, reply.json()))

    def stream(self):
        path, body, answer = self.random.choice(self.cases)
        reply = self.post(path, {**body, "stream": True})
        if reply.status == 200:
            self.compare(path, body, answer, streamed(path, reply.body))

    def nonsense(self):
        self.refused(self.random.choice(PATHS), self.random.choice(NONSENSE))

    def too_long(self):
        self.refused("/v1/completions", {"prompt": "the sea " * 20_000, "max_tokens": 5})

    def refused(self, path, body):
        reply = self.post(path, body)
        if reply.status == 200:
            self.wrong.append(("nonsense was answered", path, str(body)[:300]))

    def huge(self):
        if self.random.random() < 0.1:  # they are slow to send
            self.refused("/v1/completions", {"prompt": "the sea " * 1_500_000, "max_tokens": 1})

    def capture(self):
        ids = [self.random.randrange(10, 900) for _ in range(200)]
        reply = self.post("/v1/capture", {"prompt": ids, "layers": "all", "encoding_format": "float"})
        if reply.status == 200 and reply.json()["positions"] != list(range(200)):
            self.wrong.append(("a capture of other positions", "/v1/capture", str(ids)))

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), 10)

    def leave(self):
        path, body, _ = self.random.choice(self.cases)
        data = json.dumps({**body, "stream": True}).encode()
        with self.connect() as wire:
            wire.sendall(head(path, len(data)) + data)
            wire.recv(1 + self.random.randrange(400))
        self.counts["left in the middle"] += 1

    def unread(self):
        data = json.dumps({"prompt": "Hi", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
        with self.connect() as wire:
            wire.sendall(head("/v1/completions", len(data)) + data)
            time.sleep(self.random.random() * 2)
        self.counts["unread"] += 1

    def half(self):
        with self.connect() as wire:
            wire.sendall(
                head("/v1/completions", 1000)[: 1 + self.random.randrange(90)] + b"{" * self.random.randrange(3)
            )
            time.sleep(self.random.random())
        self.counts["half requests"] += 1


def clients(port, cases, seed, seconds, results):
    """One process of them."""
    counts, wrong, until = collections.Counter(), [], time.monotonic() + seconds
    threads = [
        threading.Thread(target=Client(port, cases, f"{seed}/{i}", counts, wrong).run, args=(until,))
        for i in range(CLIENTS // PROCESSES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((counts, wrong[:20]))


def watch(port, seconds, results):
    """How long /health takes, each tenth of a second."""
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        try:
            ok = ask(port, "/health", timeout=20).status == 200
        except FAILURES:
            ok = False
        times.append(time.monotonic() - start if ok else 20.0)
        time.sleep(0.1)
    results.put(sorted(times))


def let_loose(server, cases, seed, seconds):
    """200 clients and a watcher for so long. Gives counts, what was wrong, and the times of /health."""
    results, health = multiprocessing.Queue(), multiprocessing.Queue()
    jobs = [
        multiprocessing.Process(target=clients, args=(server.port, cases, f"{seed}/{i}", seconds, results))
        for i in range(PROCESSES)
    ]
    jobs.append(multiprocessing.Process(target=watch, args=(server.port, seconds, health)))
    for job in jobs:
        job.start()
    counts, wrong = collections.Counter(), []
    for _ in range(PROCESSES):
        some, bad = results.get(timeout=seconds + 300)
        counts.update(some)
        wrong += bad
    times = health.get(timeout=60)
    for job in jobs:
        job.join()
    return counts, wrong, times


def quiet(server):
    """Waits until nothing runs; what still does after a minute."""
    end = time.monotonic() + 60
    while True:
        busy = [
            f"{name} {n:.0f}"
            for name in ("requests_running", "requests_waiting", "kv_blocks_used")
            if (n := server.metric(name))
        ]
        if not busy or time.monotonic() > end:
            return ", ".join(busy)
        time.sleep(0.2)


def attack(area):
    questions = [line.split("\t")[0] for line in (ROOT / "tests/data/questions.tsv").read_text().splitlines()][:40]
    with area.serve("--client-timeout", 10) as server:
        cases = []
        for i, question in enumerate(questions):
            path = PATHS[i % 4]
            body = body_of(path, question)
            cases.append((path, body, said(path, server.ask(path, body).json())))
        time.sleep(1)
        descriptors, threads, rss = server.descriptors(), server.status("Threads"), server.rss_mb()
        counts, wrong, times = let_loose(server, cases, area.seed, max(10, area.seconds - 30))
        for what, *details in wrong:
            area.check("an answer under load", what, "\n".join(map(str, details)))
        area.tried += counts["right"]
        area.note(", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
        left = quiet(server)
        time.sleep(12)  # kept-alive and half connections end with --client-timeout
        now = server.descriptors(), server.status("Threads"), server.rss_mb()
        area.check("nothing is left of them", left and f"left behind: {left}", server.line)
        area.check("descriptors", now[0] > descriptors + 2 and f"{descriptors} before, {now[0]} after", server.line)
        area.check("threads", now[1] > threads + 8 and f"{threads} before, {now[1]} after", server.line)
        area.check(
            "memory",
            now[2] - rss > GROWTH_MB and f"{rss} MiB before, {now[2]} after, most {server.peak_mb()}",
            server.line,
        )
        p99, most = times[int(len(times) * 0.99)], times[-1]
        area.check("/health", (p99 > 0.5 or most > 3) and f"99% within {p99:.2f} s, longest {most:.2f} s", server.line)
        area.note(
            f"/health: median {1e3 * times[len(times) // 2]:.1f} ms, 99% {1e3 * p99:.0f} ms, longest "
            f"{1e3 * most:.0f} ms"
        )
        area.note(f"memory: {rss} MiB, then {now[2]}, most {server.peak_mb()}")
        area.check("the server", server.problem(), server.line)
    stop_with_clients(area, cases)


def stop_with_clients(area, cases):
    """SIGTERM while 40 are answered: all of them get the rest."""
    import signal

    for end in (signal.SIGTERM, signal.SIGINT):
        with area.serve("--max-sequences", 40) as server:
            timer = threading.Timer(0.5, server.process.send_signal, (end,))
            timer.start()
            replies = together(
                40,
                lambda i: ask(
                    server.port, "/v1/completions", {"prompt": f"{i} is", "max_tokens": 300, "ignore_eos": True}
                ),
            )
            whole = sum(
                not isinstance(r, Exception) and r.status == 200 and r.json()["usage"]["completion_tokens"] == 300
                for r in replies
            )
            refused = sum(not isinstance(r, Exception) and r.status == 503 for r in replies)
            code = server.stop(end)
            ok = whole + refused == 40 and whole > 0 and code == 0
            area.check(
                f"{end.name} with 40 clients",
                not ok and f"{whole} whole, {refused} refused, exit code {code}",
                server.line,
            )
