"""A hostile hub, at HF_ENDPOINT: tags, commits, names, sizes, hashes, redirects. No file outside the hub's folder is
touched, no token leaves the host."""

import hashlib
import http.server
import json
import os
import threading
import time

from common import DEMO, environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret_token_0123"
NAMES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
]
ODD = [
    "../../../../../victim",
    "../../../../../../victim",
    "..",
    ".",
    "",
    "/",
    "a/b",
    "a\\b",
    "%2e%2e%2fvictim",
    "x" * 5000,
    "\t",
    "a b",
    "é",
    "W/../../../../victim",
    "-rf",
    "CON",
    "~/victim",
    "config.json",
    "..%00",
    "blobs/../../victim",
]


def tag(data):
    """As a hub has it: the SHA-256 of a large file, git's own hash of a small one."""
    return (
        hashlib.sha256(data).hexdigest()
        if len(data) > 1_000_000
        else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )


class Hub:
    """What a hub answers; each attack changes something of it."""

    def __init__(self):
        self.files = {name: (DEMO / name).read_bytes() for name in NAMES}
        self.names = list(NAMES)
        self.etag = tag
        self.commit, self.sha = COMMIT, COMMIT
        self.redirect = None  # where weights are
        self.size = len  # what the header says of a file
        self.body = lambda data: data
        self.listing = None
        self.seen = []  # host and token of each request


def serve(hub):
    """Starts a hub; gives its server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status, body, length=None, **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(length if length is not None else len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            hub.seen.append((self.headers.get("host", ""), self.headers.get("authorization", "")))
            try:
                self.reply()
            except (OSError, UnicodeError):
                self.close_connection = True

        def reply(self):
            if self.path.startswith("/api/"):
                listing = (
                    hub.listing
                    if hub.listing is not None
                    else json.dumps({"sha": hub.sha, "siblings": [{"rfilename": name} for name in hub.names]}).encode()
                )
                return self.answer(200, listing, content_type="application/json")
            name = (
                self.path.split("/resolve/")[-1].split("/", 1)[-1]
                if "/resolve/" in self.path
                else self.path.split("/", 2)[-1]
            )
            data = hub.files.get(name, b"stolen")
            common = {"x_repo_commit": hub.commit, "etag": f'"{hub.etag(data)}"'}
            if hub.redirect and "/resolve/" in self.path and name.endswith(".safetensors"):
                return self.answer(
                    302,
                    b"",
                    location=hub.redirect.format(port=server.server_port, name=name),
                    x_linked_size=str(hub.size(data)),
                    x_linked_etag=common["etag"],
                    **common,
                )
            body = hub.body(data)
            if not self.headers.get("range"):
                return self.answer(200, body, length=hub.size(data), **common)
            first, _, last = self.headers["range"][6:].partition("-")
            part = body[int(first or 0) : int(last) + 1 if last else None]
            self.answer(206, part, content_range=f"bytes {first}-{last or len(body) - 1}/{hub.size(data)}", **common)

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):  # a client that goes away
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def attacks():
    """Name, what it changes, and whether a model may come of it."""

    def change(**fields):
        return lambda hub: hub.__dict__.update(fields)

    yield "an honest hub", change(), True
    yield "an honest redirect", change(redirect="http://127.0.0.1:{port}/files/{name}"), True
    for odd in ODD:
        yield f"the tag {odd[:30]!r}", change(etag=lambda _, odd=odd: odd), False
        yield f"the commit {odd[:30]!r}", change(commit=odd, sha=odd), False
        yield (
            f"a file named {odd[:30]!r}",
            change(names=[*NAMES, odd, odd + ".safetensors", odd + "/config.json"]),
            None,
        )
    yield "a redirect to another host", change(redirect="http://localhost:{port}/files/{name}"), None
    yield "a redirect to an address within", change(redirect="http://localhost:{port}@127.0.0.1:1/{name}"), None
    yield "a redirect to itself", change(redirect="/org/model/resolve/main/{name}"), False
    yield "a redirect to a file", change(redirect="file:///etc/passwd"), False
    for name, size in (
        ("1 more", lambda d: len(d) + 1),
        ("1 less", lambda d: len(d) - 1),
        ("2^62", lambda d: 1 << 62),
        ("2^64 + 1", lambda d: (1 << 64) + 1),
        ("-1", lambda d: -1),
        ("words", lambda d: "many"),
        ("0", lambda d: 0),
    ):
        yield f"a size of {name}", change(size=size), False
    yield (
        "other bytes than the hash",
        change(body=lambda d: d[:-1] + bytes([d[-1] ^ 1]) if len(d) > 1_000_000 else d),
        False,
    )
    yield "shorter files", change(body=lambda d: d[: len(d) // 2]), False
    yield "longer files", change(body=lambda d: d + b"x" * 100), False
    for name, listing in (
        ("nothing", b""),
        ("a list", b"[]"),
        ("no names", b"{}"),
        ("deep", b"[" * 100_000),
        (
            "a million names",
            json.dumps(
                {"sha": COMMIT, "siblings": [{"rfilename": f"model-{i}.safetensors"} for i in range(200_000)]}
            ).encode(),
        ),
        ("numbers", b'{"sha": 1, "siblings": [1]}'),
        ("an error page", b"<html>" + b"x" * 1_000_000),
    ):
        yield f"a listing of {name}", change(listing=listing), False


def outside(home):
    """All files of a home but those where the hub's belong, with what they hold."""
    found = {}
    for folder, _, files in os.walk(home):
        if folder.startswith(str(home / "hf" / "hub" / "models--org--model")):
            continue
        for name in files:
            path = os.path.join(folder, name)
            found[path] = os.readlink(path) if os.path.islink(path) else open(path, "rb").read()
    return found


def strays(home):
    """Links that lead out of the hub's folder."""
    top = os.path.realpath(home / "hf" / "hub")
    return [
        os.path.join(folder, name)
        for folder, _, files in os.walk(top)
        for name in files
        if os.path.islink(os.path.join(folder, name))
        and not os.path.realpath(os.path.join(folder, name)).startswith(top)
    ]


def one(area, name, change, may):
    hub = Hub()
    change(hub)
    server = serve(hub)
    home = area.folder("home")
    (home / "hf" / "hub").mkdir(parents=True)
    for place in (home, home / "hf", home / "hf" / "hub"):
        (place / "victim").write_text("what the user has")
    (home / "cache").mkdir()
    before = outside(home)
    env = environment(
        HOME=home, HF_HOME=home / "hf", HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_TOKEN=TOKEN
    )
    result = area.run(
        "generate", "org/model", "Hi", "--max-tokens", 1, "--threads", 1, env=env, cache=home / "cache", timeout=60
    )
    server.shutdown()
    server.server_close()
    after = {path: data for path, data in outside(home).items() if not path.startswith(str(home / "cache"))}
    touched = sorted(set(before) ^ set(after)) + [
        path for path in before if path in after and before[path] != after[path]
    ]
    touched = [path for path in touched if not path.endswith(".lock")]
    told = [host for host, token in hub.seen if TOKEN in token and host != f"127.0.0.1:{server.server_port}"]
    problem = touched and f"outside of its folder: {touched}" or strays(home) and f"links lead out: {strays(home)[:2]}"
    problem = problem or told and f"the token went to {told[0]}" or result.problem(60)
    if not problem and may is not None:
        problem = may != (result.code == 0) and (f"refused: {result.err[-300:]}" if may else "it was taken for a model")
    area.check(name, problem, str(result))


def attack(area):
    for name, change, may in attacks():
        one(area, name, change, may)
    rng = area.random
    while area.time():
        parts = [
            "..",
            "/",
            "\\",
            "%2e",
            ".",
            "a",
            "victim",
            "\u00e9",
            "~",
            "0",
            " ",
            ".part",
            "blobs",
            "snapshots",
            COMMIT,
        ]
        odd = (
            "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))
            .encode("latin-1", "replace")
            .decode("latin-1")
        )
        fields = rng.choice([{"etag": lambda _, odd=odd: odd}, {"commit": odd, "sha": odd}, {"names": [*NAMES, odd]}])
        one(area, f"a random {next(iter(fields))}", lambda hub, fields=fields: hub.__dict__.update(fields), None)
    time.sleep(0.1)
