"""1,100 sockets of one client, held in five ways, while another client, from another address, wants to be served."""

import multiprocessing
import socket
import time

from common import FAILURES, ask

SOCKETS = 1100
OTHER = "127.0.0.2"  # where the normal client comes from
HEADERS = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: " + b"a" * 4000
BODY = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    b"60000\r\n\r\n"
    + b'{"prompt": "'
    + b"a" * 50000
)
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
WAYS = {
    "silent": None,
    "headers by the byte": HEADERS,
    "headers by the byte, opened anew": HEADERS,
    "bodies by the byte": BODY,
    "kept alive": VERSION,
}


def hold(port, way, seconds):
    """The attacker: keeps as many sockets as it can, each as its way has it."""
    sockets, sent, end = [], {}, time.monotonic() + seconds
    data = WAYS[way]
    first = {"bodies by the byte": BODY.index(b"{"), "kept alive": len(VERSION)}.get(way, 16)

    def open_one():
        wire = socket.socket()
        wire.settimeout(0.5)
        wire.connect_ex(("127.0.0.1", port))
        wire.setblocking(False)
        sent[wire] = 0
        return wire

    def step(wire):
        if data is None:
            return
        if way == "kept alive":
            try:
                wire.recv(65536)
            except BlockingIOError:
                pass
            wire.send(VERSION)
            return
        at = sent[wire]
        size = first if at == 0 else 1
        sent[wire] = at + wire.send(data[at : at + size])

    sockets = [open_one() for _ in range(SOCKETS)]
    while time.monotonic() < end:
        start = time.monotonic()
        for i, wire in enumerate(sockets):
            try:
                step(wire)
            except BlockingIOError:
                pass
            except OSError:  # the server has closed it
                wire.close()
                sent.pop(wire)
                sockets[i] = open_one()
        if way.endswith("anew"):
            for i in range(0, SOCKETS, 7):
                sockets[i].close()
                sent.pop(sockets[i])
                sockets[i] = open_one()
        time.sleep(max(0.0, 1 - (time.monotonic() - start)))


def late(port, path, body, limit, source):
    """What is wrong with one question of the normal client."""
    try:
        reply = ask(port, path, body, timeout=30, source=source)
    except FAILURES as failure:
        return f"{path}: {failure!r}"
    if reply.status != 200 or reply.seconds > limit:
        return f"{path}: {reply.status} after {reply.seconds:.1f} s"
    return ""


def attack(area):
    for way in WAYS:
        with area.serve() as server:
            seconds = max(12, min(60, area.seconds / len(WAYS)))
            attacker = multiprocessing.Process(target=hold, args=(server.port, way, seconds), daemon=True)
            attacker.start()
            time.sleep(4)
            end = time.monotonic() + seconds - 5
            own, completions = [], []
            while time.monotonic() < end:
                for path in ("/health", "/ready", "/metrics"):
                    own.append(late(server.port, path, None, 1.0, OTHER))
                completions.append(late(server.port, "/v1/completions", {"prompt": "Hi", "max_tokens": 1}, 2.0, OTHER))
                own.append(late(server.port, "/health", None, 1.0, "127.0.0.1"))
                time.sleep(0.5)
            attacker.kill()
            attacker.join()
            how = f"{SOCKETS} sockets from 127.0.0.1, {way}\n{server.line}\na normal client from {OTHER}"
            for what, found in (("/health, /ready, /metrics", own), ("a completion", completions)):
                bad = [problem for problem in found if problem]
                area.check(f"{way}: {what}", bad and f"{len(bad)} of {len(found)} late, as {bad[0]}", how)
            area.check(f"{way}: afterwards", server.problem(), how)
