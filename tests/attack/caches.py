"""Damaged and lying cache files: rebuilt, refused in words, or without effect; never another answer."""

import json
import os
import struct

from common import FIXTURES, model_folder

MASK = (1 << 64) - 1
P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3, P64_4, P64_5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def fold(a, b):
    product = a * b
    return (product & MASK) ^ (product >> 64)


def xxh3(data):
    """XXH3-64 with seed 0 of more than 240 bytes: a lie needs the right checksum."""
    words = struct.unpack("<24Q", SECRET)
    secret_at = lambda at: struct.unpack_from("<Q", SECRET, at)[0]
    acc = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1]

    def stripe(at, key):
        values = struct.unpack_from("<8Q", data, at)
        for i in range(8):
            mixed = values[i] ^ key[i]
            acc[i ^ 1] = (acc[i ^ 1] + values[i]) & MASK
            acc[i] = (acc[i] + (mixed & 0xFFFFFFFF) * (mixed >> 32)) & MASK

    for n in range((len(data) - 1) // 64):
        stripe(64 * n, words[n % 16 : n % 16 + 8])
        if n % 16 == 15:
            for i in range(8):
                acc[i] = ((acc[i] ^ (acc[i] >> 47) ^ words[16 + i]) * P32_1) & MASK
    stripe(len(data) - 64, struct.unpack_from("<8Q", SECRET, 192 - 64 - 7))
    total = len(data) * P64_1 & MASK
    for i in range(4):
        total += fold(acc[2 * i] ^ secret_at(11 + 16 * i), acc[2 * i + 1] ^ secret_at(19 + 16 * i))
    total &= MASK
    total = ((total ^ (total >> 37)) * 0x165667919E3779F9) & MASK
    return total ^ (total >> 32)


class Cache:
    """The bytes of a cache file, as cache/FORMAT.md has them."""

    def __init__(self, data):
        self.data = bytearray(data)
        size = struct.unpack_from("<I", data, 12)[0]
        self.description = json.loads(data[64 : 64 + size])
        self.table = (64 + size + 31) // 32 * 32
        self.layers, self.experts = self.description["num_layers"], self.description["num_experts"]
        self.end = self.table + 32 * self.layers * (1 + self.experts)
        self.first = struct.unpack_from("<Q", data, self.table + 8)[0]

    def checksum(self):
        return xxh3(bytes(self.data[:24] + self.data[32 : self.first]))

    def records(self, layer):
        return self.table + 32 * (layer * (1 + self.experts) + 1)

    def sign(self):
        """Makes the checksums of the header right again."""
        for layer in range(self.layers):
            start = self.records(layer)
            struct.pack_into("<Q", self.data, start - 8, xxh3(bytes(self.data[start : start + 32 * self.experts])))
        struct.pack_into("<Q", self.data, 24, self.checksum())
        return bytes(self.data)


def lies(rng, good):
    """A name and bytes whose checksums are right, and which say what is not so."""
    cache = Cache(good)
    kind = rng.choice(["field", "field", "prefix", "entry", "record", "source", "expert"])
    odd = rng.choice([0, 1, 2, 3, 7, 64, 4096, (1 << 20) + 1, 1 << 31, (1 << 63) - 1, MASK, rng.getrandbits(64)])
    if kind in ("field", "source"):
        place = cache.description if kind == "field" else cache.description["source"]
        name = rng.choice(list(place))
        place[name] = rng.choice(
            [
                odd,
                -odd,
                str(odd),
                None,
                [],
                {},
                True,
                {"bits": "int8", "group_size": 32},
                {"bits": "bf16"},
                [place[name]] * 3,
                "x" * 5000,
            ]
        )
        text = json.dumps(cache.description).encode()
        size = struct.unpack_from("<I", good, 12)[0]
        if len(text) > cache.table - 64:
            return f"{kind} {name}, too long for its place", bytes(
                cache.data[:64] + text[:size] + cache.data[64 + size :]
            )
        cache.data[64 : 64 + size] = text.ljust(size) if len(text) <= size else text[:size]
        return f"{kind} {name}", cache.sign()
    if kind == "prefix":
        at, form = rng.choice([(8, "<I"), (12, "<I"), (16, "<Q"), (32, "<Q")])
        struct.pack_into(form, cache.data, at, odd & (0xFFFFFFFF if form == "<I" else MASK))
        struct.pack_into("<Q", cache.data, 24, cache.checksum())
        return f"prefix at {at}", bytes(cache.data)
    layer, expert = rng.randrange(cache.layers), rng.randrange(cache.experts)
    if kind == "entry":
        struct.pack_into("<Q", cache.data, cache.records(layer) - 32 + 8 * rng.randrange(3), odd)
    elif kind == "record":
        struct.pack_into("<Q", cache.data, cache.records(layer) + 32 * expert + 8 * rng.randrange(4), odd)
    else:  # an expert's bytes, which its own checksum still tells
        cache.data[rng.randrange(cache.first, len(cache.data))] ^= 1 << rng.randrange(8)
    return f"{kind} of layer {layer}", cache.sign()


def damage(rng, good):
    """A name and bytes with something wrong."""
    data, at = bytearray(good), rng.randrange(len(good))
    kind = rng.choice(["bit", "bit", "cut", "zeros", "longer", "noise", "moved", "head"])
    if kind == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "head":
        data[rng.randrange(min(2000, len(data)))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        data = data[:at]
    elif kind == "zeros":
        data[at : at + 4096] = bytes(min(4096, len(data) - at))
    elif kind == "longer":
        data += rng.randbytes(rng.choice([1, 4096, 100_000]))
    elif kind == "noise":
        data[at : at + 64] = rng.randbytes(min(64, len(data) - at))
    else:
        data = data[4096:] + data[:4096]
    return f"{kind} at {at}", bytes(data)


def attack(area):
    model = model_folder(area, "model", FIXTURES / "qwen3_moe")
    cache = area.folder("cache")
    command = ["generate", model, "The sea", "--max-tokens", 8, "--json", "--threads", 1, "--max-context", 256]
    answer = lambda result: json.loads(result.out)["tokens"] if result.code == 0 else None
    alone = area.run(*command, cache=cache)
    want, path = answer(alone), next(cache.glob("*.moebius"))
    good = path.read_bytes()
    first = Cache(good)
    area.check(
        "the checksum as this program computes it",
        struct.unpack_from("<Q", good, 24)[0] != first.checksum() and "another one",
        str(alone),
    )
    area.check(
        "the same once more",
        area.run(*command, cache=cache).out.split('"timings"')[0] != alone.out.split('"timings"')[0]
        and "another answer",
    )
    ends = {"answered": 0, "refused": 0}
    tried = 0
    while tried < 40 or area.time():
        what, data = (lies if tried % 2 else damage)(area.random, good)
        if tried % 10 == 9:  # the file that remembers the state of the sources
            what, data = "sources.json", None
            for side in cache.glob("*.sources.json"):
                side.write_bytes(
                    area.random.choice(
                        [b"", b"{", b"[]", b"null", b"[" * 100_000, side.read_bytes()[:-5], area.random.randbytes(300)]
                    )
                )
        else:
            path.write_bytes(data)
            if area.random.random() < 0.5:
                os.utime(path, (0, 0))
        options = area.random.choice([[], ["--experts-memory", "map"], ["--experts-memory", "copy"]])
        result = area.run(*command, *options, cache=cache, timeout=60)
        got = answer(result)
        problem = result.problem(60) or (got is not None and got != want and f"another answer: {got}, not {want}")
        ends["refused" if got is None else "answered"] += 1
        if (
            not area.check(f"a cache with {what}", problem, str(result), keep=path if path.exists() else None)
            or got is None
        ):
            for file in cache.iterdir():
                file.unlink()
        if not path.exists():
            path.write_bytes(good)
        tried += 1
    area.note(f"{ends['answered']} answered as before, {ends['refused']} refused")
