"""Schemas, expressions, grammars, tools and prompts that are small to write and large to compile, one after the other
and at once."""

import json

from common import FAILURES, ask, chat, together


def nested(depth, wrap, inner):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def completion(**fields):
    return "/v1/completions", {"prompt": "a", "max_tokens": 8, **fields}


def schemas():
    """Name and schema."""
    obj = lambda inner: {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a"]}
    names = [f"p{i}" for i in range(10_000)]
    yield "deep objects", nested(60, lambda s: {"type": "object", "properties": {"a": s}}, {"type": "string"})
    yield "deeper than JSON may be", nested(400, lambda s: {"items": s}, {})
    yield "two each, 12 deep", nested(12, obj, {"type": "integer"})
    yield (
        "10,000 properties",
        {"type": "object", "properties": {n: {"type": "string"} for n in names}, "required": names},
    )
    yield "100,000 words", {"enum": [f"word {i}" for i in range(100_000)]}
    yield "an enum of long words", {"enum": ["x" * 100_000 + str(i) for i in range(20)]}
    yield (
        "10,000 ways",
        {"anyOf": [{"type": "object", "properties": {n: {"type": "number"}}, "required": [n]} for n in names]},
    )
    yield "deep ways", nested(12, lambda s: {"anyOf": [s, {"type": "array", "items": s}]}, {"type": "null"})
    yield "all of many", {"allOf": [{"type": "object", "properties": {n: {}}} for n in names[:2000]]}
    yield "a reference to itself", {"$ref": "#"}
    yield (
        "references in a ring",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    )
    yield (
        "references that double",
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2}
                for i in range(40)
            }
            | {"d40": {}},
        },
    )
    yield "a long string", {"type": "string", "minLength": 10**9, "maxLength": 10**9}
    yield "a string of up to a million", {"type": "string", "maxLength": 1_000_000}
    yield "a long list", {"type": "array", "minItems": 10**7, "items": {"type": "string", "maxLength": 10**6}}
    yield "a large number", {"type": "integer", "minimum": 10**300, "maximum": 10**308}
    yield "a small step", {"type": "number", "multipleOf": 1e-300}
    for pattern in (
        "(a*)*b",
        "(a{1000}){1000}",
        "(a|aa)+$",
        "(.{0,60000}){0,60000}",
        "[\\u0000-\\uffff]{100000}",
        "(?=a)b",
        "(" * 500 + ")" * 500,
        "a" * 200_000,
        "(x+x+)+y",
        "\\p{L}{0,5000}",
        "(((a?){50}){50}){50}a{50}",
    ):
        yield f"pattern {pattern[:24]}", {"type": "string", "pattern": pattern}


def requests(rng):
    """Name, path and body."""
    for name, schema in schemas():
        yield f"schema: {name}", *completion(guided_json=schema)
        yield (
            f"tool: {name}",
            "/v1/chat/completions",
            chat(
                "a",
                tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}],
                tool_choice="required",
            ),
        )
        if "pattern" in schema:
            yield f"expression: {name[8:]}", *completion(guided_regex=schema["pattern"])
    for text in (
        'start: start start | ""',
        'start: a\na: b b\nb: c c\nc: "x"*',
        "start: " + "(" * 300 + '"a"' + ")" * 300,
        'start: "a"' * 50_000,
        "start: /(a*)*b/",
        "start: /(.|.)*/ start",
        "start: " + " | ".join(f'"{i}"' for i in range(50_000)),
        "\n".join(f"start{i or ''}: start{i + 1} start{i + 1}" for i in range(60)) + '\nstart60: "a"',
        "start: %json {",
        "start: undefined",
        "start: /[a-z]{1,100000}/",
    ):
        yield f"grammar: {text[:30]!r}", *completion(guided_grammar=text)
    yield "choices", *completion(guided_choice=[f"choice {i} " + "x" * 100 for i in range(20_000)])
    yield (
        "256 tools of 4 KB",
        "/v1/chat/completions",
        chat(
            "a",
            tools=[
                {"type": "function", "function": {"name": f"f{i}", "description": "d" * 4000, "parameters": {}}}
                for i in range(256)
            ],
        ),
    )
    for name, text in (
        ("digits", "".join(rng.choice("0123456789") for _ in range(4_000_000))),
        ("one letter", "a" * 4_000_000),
        ("blanks", " " * 4_000_000),
        ("newlines", "\n" * 4_000_000),
        ("wide", "é漢😀" * 400_000),
        ("marks", "a" + "\u0301" * 1_000_000),
        ("special", "<|end|>" * 500_000),
        ("half special", "<|en" * 1_000_000),
        ("quotes", "'" * 4_000_000),
        ("words", "the sea " * 500_000),
    ):
        yield f"a prompt: {name}", *completion(prompt=text)
        yield f"/tokenize: {name}", "/tokenize", {"prompt": text}
    yield "65,536 stop strings", *completion(stop=["x"] * 65_536)
    yield "biases", *completion(logit_bias={str(i): 1 for i in range(100_000)})
    yield (
        "64 prompts, 16 choices, a grammar",
        *completion(prompt=["a"] * 64, n=16, guided_json={"enum": [f"word {i}" for i in range(3000)]}),
    )


def ask_one(area, server, name, path, body):
    """Answered or refused within ten seconds; whoever goes on after that has cost too much."""
    data = json.dumps(body).encode()
    how = f"{server.line}\nPOST {path} of {len(data)} bytes: {data[:600].decode()}"
    try:
        reply = server.ask(path, data, timeout=60)
        problem = (
            reply.status >= 500
            and f"status {reply.status}: {reply.body[:200]}"
            or reply.seconds > 10
            and f"{reply.status} after {reply.seconds:.0f} s"
        )
        problem = problem or reply.status != 200 and len(reply.body) > 4000 and f"a refusal of {len(reply.body)} bytes"
    except FAILURES as failure:
        problem = repr(failure)
    area.check(name, server.problem() or problem, how)


def mixed(rng, kinds):
    """A random schema of all of them."""
    if rng.random() < 0.3:
        return rng.choice(kinds)
    inner = mixed(rng, kinds)
    count = rng.choice([1, 10, 1000])
    return rng.choice(
        [
            {"anyOf": [inner] * rng.choice([2, 20])},
            {"type": "array", "items": inner, "minItems": count, "maxItems": count * rng.choice([1, 1000])},
            {"allOf": [inner, inner]},
            {"not": inner},
            {"type": "object", "properties": {f"k{i}": inner for i in range(rng.choice([1, 30]))}},
            {"oneOf": [inner, {"type": "string", "pattern": "(a|b){" + str(count) + "}"}]},
            {"type": "object", "additionalProperties": inner, "minProperties": count},
            {"if": inner, "then": inner},
            {"type": "object", "patternProperties": {"^(a*)*$": inner}},
        ]
    )


def attack(area):
    server = area.serve()
    try:
        for name, path, body in requests(area.random):
            ask_one(area, server, name, path, body)
            if not server.alive():
                server = area.serve()
        small = [s for _, s in schemas() if len(json.dumps(s)) < 5000]
        together(16, lambda i: ask(server.port, *completion(guided_json=small[i % len(small)]), timeout=60))
        area.check("16 of them at once", server.problem(5.0), server.line)
        while area.time():
            schema = mixed(area.random, small)
            if len(json.dumps(schema)) < 1_000_000:
                ask_one(area, server, "a random schema", *completion(guided_json=schema))
            if not server.alive():
                server = area.serve()
    finally:
        server.stop()
