"""Raw HTTP: shapes that parsers disagree about, hosts, origins, keys, and requests with random bytes in them."""

import re
import socket
import time

from common import ask

BODY = b'{"prompt":"Hi","max_tokens":1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
WHOLE = HEAD + LENGTH + b"\r\n" + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"

OK, REFUSED = {200}, {400, 404, 405, 408, 411, 413, 414, 417, 422, 431, 501, 505, None}  # None: closed without a word
# Bytes, and the statuses that are right for them.
SHAPES = {
    "whole": (WHOLE, OK),
    "chunked": (CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n", OK),
    "length and chunks": (HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + BODY, REFUSED),
    "two lengths": (HEAD + LENGTH + b"content-length: 5\r\n\r\n" + BODY, REFUSED),
    "the same length twice": (HEAD + LENGTH + LENGTH + b"\r\n" + BODY, OK | REFUSED),
    "a length with a sign": (HEAD + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY, REFUSED),
    "a length below zero": (HEAD + b"content-length: -1\r\n\r\n" + BODY, REFUSED),
    "a length in hex": (HEAD + b"content-length: 0x1e\r\n\r\n" + BODY, REFUSED),
    "a length of 30 digits": (HEAD + b"content-length: " + b"9" * 30 + b"\r\n\r\n" + BODY, REFUSED),
    "a list of lengths": (HEAD + b"content-length: 30, 30\r\n\r\n" + BODY, OK | REFUSED),
    "a blank before the colon": (HEAD + b"content-length : 30\r\n\r\n" + BODY, REFUSED),
    "a folded line": (GET + b"x: a\r\n b\r\n\r\n", REFUSED),
    "NUL in a header": (GET + b"x: a\0b\r\n\r\n", REFUSED),
    "NUL in the path": (b"GET /hea\0lth HTTP/1.1\r\nhost: localhost\r\n\r\n", REFUSED),
    "CR alone": (GET + b"x: a\rb\r\n\r\n", REFUSED),
    "LF alone": (b"GET /health HTTP/1.1\nhost: localhost\n\n", OK | REFUSED),
    "1 MB of header": (GET + b"x: " + b"a" * 1_000_000 + b"\r\n\r\n", REFUSED),
    "200 headers": (GET + b"".join(b"x%d: a\r\n" % i for i in range(200)) + b"\r\n", REFUSED),
    "a path of 100 KB": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", REFUSED),
    "HTTP/0.9": (b"GET /health\r\n\r\n", REFUSED),
    "HTTP/2.0": (b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n", REFUSED),
    "a preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", REFUSED),
    "a method of noise": (b"\x01\x02 /health HTTP/1.1\r\nhost: localhost\r\n\r\n", REFUSED),
    "TLS on a plain port": (b"\x16\x03\x01\x02\x00\x01\x00", REFUSED),
    "no such method": (b"BREW /health HTTP/1.1\r\nhost: localhost\r\n\r\n", REFUSED),
    "CONNECT": (b"CONNECT evil.org:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", REFUSED | {403}),
    "TRACE": (b"TRACE / HTTP/1.1\r\nhost: localhost\r\n\r\n", REFUSED),
    "chunks of no size": (CHUNKED + b"\r\n\r\n", REFUSED),
    "a huge chunk": (CHUNKED + b"ffffffffffffffff\r\n" + BODY, REFUSED),
    "a chunk with a sign": (CHUNKED + b"-1\r\n" + BODY, REFUSED),
    "a chunk that is longer": (CHUNKED + b"2\r\n{}xx\r\n0\r\n\r\n", REFUSED),
    "an endless extension": (CHUNKED + b"1;" + b"a" * 100_000, REFUSED),
    "trailers": (CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\ncontent-length: 5\r\n\r\n", OK | REFUSED),
    "two codings": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", REFUSED),
    "chunked, but not last": (HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n", REFUSED),
    "expect": (HEAD + b"expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY, OK | {100}),
    "expect what nobody knows": (HEAD + b"expect: the best\r\n" + LENGTH + b"\r\n" + BODY, OK | REFUSED),
    "another type": (WHOLE.replace(b"application/json", b"text/plain"), REFUSED | {415} | OK),
    "upgrade": (GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", OK | REFUSED),
    "zipped": (HEAD + b"content-encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY, OK | REFUSED | {415}),
}
HOSTS = {
    "localhost": OK,
    "LOCALHOST": OK,
    "localhost.": OK,
    "127.0.0.1": OK,
    "[::1]": OK,
    "evil.org": {403},
    "localhost.evil.org": {403},
    "127.0.0.1.evil.org": {403},
    "localhost@evil.org": {400, 403},
    "": OK | {400},
    "0.0.0.0": OK | {403},
    "localhost:99999": {200, 400, 403},
    "2130706433": {403},
    "localhost evil.org": {400, 403},
    "xn--localhost": {403},
}
ORIGINS = {
    "null": {403},
    "http://evil.org": {403},
    "http://localhost.evil.org": {403},
    "http://localhost:1": {403},
    "https://127.0.0.1.evil.org": {403},
    "file://": {403},
    "http://localhost:PORT": OK,
}
KEY = "key-of-anna-123"
KEYS = {
    None: {401},
    "": {401},
    "Bearer": {401},
    "Bearer ": {401},
    f"Bearer {KEY}x": {401},
    f"Bearer {KEY[:-1]}": {401},
    f"Basic {KEY}": {401},
    f"bearer {KEY}": OK | {401},
    f"Bearer  {KEY}": OK | {401},
    f"Bearer {KEY}": OK,
    f"Bearer {KEY},{KEY}": {401},
    f"Bearer {KEY.upper()}": {401},
    "Bearer " + "x" * 50_000: {401, 431},
}
CLOSED = [
    "/v1/models",
    "//v1/models",
    "/v1//models",
    "/v1/./models",
    "/v1/%6dodels",
    "/V1/models",
    "/v1/models/",
    "/v1/models?",
    "/web/../v1/models",
    "/web/%2e%2e/v1/models",
    "/metrics",
    "/metrics%00",
    "/v1/vectors",
    "http://localhost/v1/models",
]


def status(port, data, over=False):
    """What the server answers first to these bytes; None if it closes without a word. `over`: it hears that no more
    will come."""
    with socket.create_connection(("127.0.0.1", port), 20) as wire:
        wire.settimeout(20)
        try:
            wire.sendall(data)
            if over:
                wire.shutdown(socket.SHUT_WR)
            got = b""
            while b"\r\n" not in got and (more := wire.recv(4096)):
                got += more
        except TimeoutError:
            return "nothing for 20 s"
        except OSError:
            return None
    found = re.match(rb"HTTP/1\.[01] (\d{3})", got)
    return int(found[1]) if found else None if not got else f"{got[:40]!r}"


def see(area, port, what, data, want):
    got = status(port, data)
    return area.check(what, got not in want and f"answer {got}", data[:3000])


def attack(area):
    with area.serve("--client-timeout", 3) as server:
        for what, (data, want) in SHAPES.items():
            see(area, server.port, what, data, want)
        for host, want in HOSTS.items():
            see(
                area,
                server.port,
                f"host {host!r}",
                b"GET /v1/models HTTP/1.1\r\nhost: %b\r\n\r\n" % host.encode(),
                want,
            )
        see(area, server.port, "no host", b"GET /v1/models HTTP/1.1\r\n\r\n", OK | {400})
        see(
            area,
            server.port,
            "two hosts",
            b"GET /v1/models HTTP/1.1\r\nhost: evil.org\r\nhost: localhost\r\n\r\n",
            {400, 403},
        )
        for origin, want in ORIGINS.items():
            for method in ("GET", "OPTIONS"):
                value = origin.replace("PORT", str(server.port))
                head = f"{method} /v1/models HTTP/1.1\r\nhost: localhost:{server.port}\r\norigin: {value}\r\n"
                head += "access-control-request-method: GET\r\n\r\n"
                see(
                    area,
                    server.port,
                    f"{method} from {origin}",
                    head.encode(),
                    want | ({204, 405} if method == "OPTIONS" and want == OK else set()),
                )
        too_large(area, server)
        pipelined(area, server)
        while area.time():
            data = noise(area.random)
            got = status(server.port, data, over=True)
            area.check(
                "random bytes in a request",
                isinstance(got, int)
                and got >= 500
                and got not in (501, 505)
                and f"status {got}"
                or isinstance(got, str)
                and got,
                data[:5000],
            )
            if area.tried % 50 == 0:
                area.check("the server after them", server.problem(), data[:5000])
        time.sleep(4)
        area.check(
            "the server afterwards",
            server.problem() or server.descriptors() > 40 and f"{server.descriptors()} descriptors",
            server.line,
        )
    keys(area)


def noise(rng):
    data = bytearray(rng.choice([WHOLE, CHUNKED + b"1e\r\n" + BODY + b"\r\n0\r\n\r\n", GET + b"\r\n", WHOLE * 3]))
    for _ in range(rng.choice([1, 2, 5, 30])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at:at] = rng.choice(
                [
                    b"\r\n",
                    b"\0",
                    b" ",
                    b":",
                    b"\r",
                    b"\n",
                    b"transfer-encoding: chunked\r\n",
                    b"content-length: 3\r\n",
                    b"\xff" * 10,
                ]
            )
        elif kind == 2:
            del data[at : at + rng.choice([1, 10])]
        else:
            data[at:at] = data[max(0, at - 20) : at]
    return bytes(data)


def too_large(area, server):
    """Who sends too much is told so, although most clients listen only when they have sent all."""
    data = HEAD + b"content-length: %d\r\n\r\n" % (40 << 20) + b"a" * (40 << 20)
    told = [status(server.port, data) for _ in range(5)]
    area.check(
        "a body of 40 MB",
        told != [413] * 5 and f"answers {told}, not 413",
        "HEAD, content-length: 41943040, and so many bytes at once, then reads",
    )


def pipelined(area, server):
    """2,000 requests in one piece are answered in their order."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as wire:
        wire.sendall(b"".join(GET + b"x-request-id: r%d\r\n\r\n" % i for i in range(2000)))
        got, end = b"", time.monotonic() + 20
        while got.count(b"x-request-id:") < 2000 and time.monotonic() < end and (more := wire.recv(1 << 16)):
            got += more
    ids = re.findall(rb"x-request-id: (r\d+)", got)
    area.check(
        "2,000 at once on one connection",
        ids != [b"r%d" % i for i in range(2000)]
        and f"{len(ids)} answers, in their order: {ids == sorted(ids, key=lambda x: int(x[1:]))}",
    )


def keys(area):
    file = area.dir / "keys"
    file.write_text(f"{KEY}\nkey-of-bert-456\n")
    with area.serve("--api-key-file", file) as server:
        for value, want in KEYS.items():
            for path in ("/v1/models", "/metrics"):
                headers = {} if value is None else {"authorization": value}
                area.check(
                    f"key {str(value)[:30]!r} for {path}",
                    (got := ask(server.port, path, headers=headers).status) not in want and f"status {got}",
                )
        for path in CLOSED:
            got = status(server.port, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            area.check(f"{path} without a key", got not in {400, 401, 403, 404} and f"status {got}")
        area.check("/health without a key", ask(server.port, "/health").status != 200 and "closed")
