"""Requests that are small to send and large to serve, one at a time and 64 together, to a server with 1 GiB of
memory."""

import json
import threading
import time

from common import FAILURES, GIB, Group, ask, together

LIMIT_BYTES = GIB
BODY_BYTES = 16 * 1024 * 1024 - 1000


def requests(rng):
    """Name, path and body of each."""
    words = "the sea " * ((BODY_BYTES - 100) // 8)
    ids = [rng.randrange(10, 900) for _ in range(3900)]
    digits = "".join(rng.choice("0123456789") for _ in range(BODY_BYTES // 4))
    nested = ",".join(['{"":0}'] * ((BODY_BYTES - 100) // 7))
    deep = "[" * 100 + "]" * 100
    return {
        "capture of numbers": (
            "/v1/capture",
            {"prompt": ids, "layers": "all", "logits": True, "encoding_format": "float"},
        ),
        "capture in base64": ("/v1/capture", {"prompt": ids, "layers": "all", "logits": True}),
        "a prompt of 16 MB": ("/v1/completions", {"prompt": words, "max_tokens": 1}),
        "a message of 16 MB": ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
        "a prompt of 240 KB": ("/v1/completions", {"prompt": words[:240_000], "max_tokens": 1}),
        "/tokenize of 16 MB": ("/tokenize", {"prompt": words, "return_token_strs": True}),
        "/tokenize of digits": ("/tokenize", {"prompt": digits}),
        "/detokenize of 3 M tokens": ("/detokenize", {"tokens": [100] * 3_000_000}),
        "small objects, 16 MB": ("/v1/chat/completions", b'{"messages":[' + nested.encode() + b"]}"),
        "prompts, 16 MB of them": ("/v1/completions", {"prompt": ["a"] * (BODY_BYTES // 6), "max_tokens": 1}),
        "ids, 16 MB of them": (
            "/v1/completions",
            b'{"max_tokens":1,"prompt":[' + b"1," * (BODY_BYTES // 2 - 40) + b"1]}",
        ),
        "deep lists, 16 MB": (
            "/v1/chat/completions",
            f'{{"messages":[{",".join([deep] * (BODY_BYTES // 202))}]}}'.encode(),
        ),
        "a schema of 16 MB": (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 1, "guided_json": {"enum": [str(i) for i in range(1_000_000)]}},
        ),
        "a long n with long answers": (
            "/v1/completions",
            {"prompt": ids, "n": 16, "max_tokens": 100, "logprobs": 5, "ignore_eos": True},
        ),
        "a vector of 16 MB": ("/v1/completions", {"prompt": "a", "steer": [{"layer": 0, "vector": [0.5] * 3_000_000}]}),
    }


def watch(server, worst, stop):
    """The longest time that /health took."""
    while not stop.is_set():
        start = time.monotonic()
        try:
            ask(server.port, "/health", timeout=30)
        except FAILURES:
            pass
        worst.append(time.monotonic() - start)
        time.sleep(0.2)


def one(area, name, path, body, count, group):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with area.serve("--client-timeout", 30, group=group) as server:
        server.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
        worst, stop = [], threading.Event()
        watcher = threading.Thread(target=watch, args=(server, worst, stop), daemon=True)
        watcher.start()
        replies = together(count, lambda _: ask(server.port, path, data, timeout=120), timeout=180)
        stop.set()
        watcher.join()
        peak = server.peak_mb() if server.alive() else 0
        seen = {}
        for reply in replies:
            kind = (
                "no answer in time"
                if reply is None
                else type(reply).__name__
                if isinstance(reply, Exception)
                else str(reply.status)
            )
            seen[kind] = seen.get(kind, 0) + 1
        how = f"{server.line}\nin a control group of {LIMIT_BYTES >> 20} MiB\n"
        how += f"{count} x POST {path} of {len(data)} bytes: {data[:200]!r}...\n"
        how += f"answers: {seen}\npeak: {peak} MiB"
        what = name if count == 1 else f"{name}, {count} together"
        problem = (
            server.problem(5.0) or any(kind.startswith("5") and kind != "503" for kind in seen) and f"answers: {seen}"
        )
        area.check(what, problem or (max(worst) > 5 and f"/health took {max(worst):.1f} s meanwhile"), how)
        return peak


def attack(area):
    group = Group(LIMIT_BYTES)
    if not group.made:
        area.note(
            "left out: this machine lets us make no memory control group (another limit, as of address space, would "
            "be no substitute)"
        )
        return
    try:
        for name, (path, body) in requests(area.random).items():
            peaks = [one(area, name, path, body, count, group) for count in (1, 64)]
            area.note(f"{name}: at most {peaks[0]} MiB, 64 together {peaks[1]} MiB")
    finally:
        group.remove()
