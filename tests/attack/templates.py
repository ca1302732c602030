"""Hostile chat templates: each is rendered or refused in words, in seconds and little memory; and a server that has
one goes on."""

from common import DEMO, FAILURES, chat, model_folder

MANY = 100_000


def deep(piece, count=MANY, before="1", after=""):
    return "{{ " + before + piece * count + after + " }}"


def doubling(step, count=60, start="'aaaaaaaa'", shown="{{ ns.s }}"):
    return (
        "{% set ns = namespace(s="
        + start
        + ") %}{% for i in range("
        + str(count)
        + ") %}{% set ns.s = "
        + step
        + " %}{% endfor %}"
        + shown
    )


def looped(body, start="[1] * 10000"):
    return "{% set s = " + start + " %}{% for i in range(99999) %}" + body + "{% endfor %}"


NESTED = "{% set ns = namespace(s=[]) %}{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}"
# What ended the server, hung, or took its memory in the first attack, and kin of it.
LIST = {
    **{
        f"deep: {piece.strip()}": deep(piece)
        for piece in (
            "+1",
            "-1",
            "~1",
            "|string",
            "()",
            ".b",
            "[0]",
            " and 1",
            " or 1",
            "*1",
            "**1",
            " == 1",
            " in 1",
            " is odd",
            "|default(1)",
        )
    },
    **{
        f"deep before: {piece.strip()}": "{{ " + piece * MANY + "1 }}"
        for piece in ("not ", "-", "+", "(", "[", "{'a':", "1 if 1 else ", "1 if ")
    },
    "deep elif": "{% if 0 %}" + "{% elif 0 %}" * 50_000 + "{% endif %}",
    "deep if": "{% if 1 %}" * 50_000 + "{% endif %}" * 50_000,
    "deep for": "{% for i in [1] %}" * 20_000 + "{% endfor %}" * 20_000,
    "deep slices": deep("[0:1]", 50_000, "'a'"),
    "deep brackets": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "deep macros": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "deep calls": "{% macro m() %}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 9000 + "{% endcall %}" * 9000,
    "deep filters": "{% filter upper %}" * 20_000 + "{% endfilter %}" * 20_000,
    "deep sets": "{% set a %}" * 20_000 + "{% endset %}" * 20_000,
    "nested, dropped": NESTED + "x",
    "nested, shown": NESTED + "{{ ns.s }}",
    "nested, as JSON": NESTED + "{{ ns.s|tojson }}",
    "nested, compared": NESTED + "{{ ns.s == ns.s }}",
    "nested dicts": NESTED.replace("[ns.s]", "{'a': ns.s}") + "{{ ns.s }}",
    **{
        f"doubling: {step}": doubling(step)
        for step in (
            "ns.s ~ ns.s",
            "ns.s + ns.s",
            "[ns.s, ns.s]|join",
            "ns.s|replace('a', 'aa')",
            "ns.s|replace('', ns.s)",
            "'%s%s'|format(ns.s, ns.s)",
            "ns.s * 2",
        )
    },
    "doubling of lists": doubling("ns.s + ns.s", 60, "[1]", "{{ ns.s|length }}"),
    "both, shown": doubling("[ns.s, ns.s]"),
    "both, as JSON": doubling("[ns.s, ns.s]", shown="{{ ns.s|tojson }}"),
    "both, compared": doubling("[ns.s, ns.s]", shown="{{ ns.s == ns.s }}"),
    "both, in": doubling("[ns.s, ns.s]", shown="{{ 1 in ns.s }}"),
    "both, sorted": doubling("[ns.s, ns.s]", shown="{{ [ns.s, ns.s]|sort }}"),
    "adding to a list": looped("{% set ns.s = ns.s + [i] %}").replace(
        "{% set s = [1] * 10000 %}", "{% set ns = namespace(s=[]) %}"
    ),
    **{
        f"once: {text[:40]}": "{{ " + text + " }}"
        for text in (
            "[1]|batch(10**10, 'x')|list",
            "[1]|slice(10**10)|list",
            "'%1000000000000d'|format(1)",
            "'%.1000000000f'|format(1.5)",
            "'a'|indent(10**10)",
            "'a\nb'|indent(10**9)",
            "'{:>10000000000}'.format(1)",
            "[1] * 10**15",
            "'a' * 10**12",
            "range(10**12)|list",
            "range(10**9)|sum",
            "range(99999)|list|string * 100",
            "(range(99999)|list|string) * 1000",
            "'a'|center(10**10)",
            "'a'.ljust(10**10)",
            "'a'.zfill(10**10)",
            "10**10**10",
            "2**1000000",
            "'a,' * 10**6|split(',')",
            "'a'|wordwrap(0)",
            "lipsum(10**6)",
            "cycler(1)|list",
            "messages|map(attribute='a' * 10**6)|list",
            "'x'|truncate(10**12)",
            "[[1] * 1000] * 1000 * 1000",
            "dict(a=1)|items|list * 10**9",
            "'a'|urlize * 10**9",
            "1/0",
            "raise_exception('x' * 10**7)",
            "'é' * 10**9",
        )
    },
    "much text": "{{ 'a' * 100000 }}" * 99_999,
    "50 MB of text": "a" * 50_000_000,
    "many statements": "{% set a = 1 %}" * 500_000,
    **{
        f"in a loop: {body}": looped(body)
        for body in (
            "{{ s.count(2) }}",
            "{{ s|tojson }}",
            "{{ s|sort }}",
            "{{ 2 in s }}",
            "{{ s|reverse|list|length }}",
            "{{ (s|string)|upper|length }}",
            "{{ s|unique|list|length }}",
            "{{ s|map('string')|join|length }}",
            "{{ s == s }}",
            "{{ s|sum }}",
            "{{ (s|string).split(',')|length }}",
            "{% set t = s[::-1] %}",
        )
    },
    "a product in a loop": looped("{{ ('a' * 10000000)|length }}"),
    "lists as text": "{{ range(99999)|list|string }}" * 50,
    "loops in loops": "{% for a in range(99999) %}" * 4 + "x" + "{% endfor %}" * 4,
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "self": "{% include 'chat_template.jinja' %}",
    "import": "{% import '/etc/passwd' as p %}{{ p }}",
}
VALUES = ["'a'", "[1]", "{'a': 1}", "messages", "1", "range(99999)", "'a' * 1000", "[1] * 1000", "ns.s", "ns"]
FILTERS = [
    "upper",
    "tojson",
    "list",
    "string",
    "sort",
    "unique",
    "reverse",
    "length",
    "join",
    "indent(999999)",
    "replace('a', 'aaaa')",
    "batch(9999999)|list",
    "items|list",
    "trim",
    "map('string')|list",
    "first",
    "safe",
    "escape",
    "center(99999999)",
    "split('a')",
    "sum",
    "dictsort",
    "default('x')",
    "select|list",
    "groupby('a')|list",
    "tojson(indent=99999)",
]


def expression(rng, depth=0):
    """Something of Jinja that may cost more than it looks."""
    if depth > 4 or rng.random() < 0.2:
        return rng.choice(VALUES)
    inner = lambda: expression(rng, depth + 1)
    return rng.choice(
        [
            lambda: f"({inner()} + {inner()})",
            lambda: f"({inner()} ~ {inner()})",
            lambda: f"({inner()} * {rng.choice([2, 10**3, 10**9])})",
            lambda: f"[{inner()}, {inner()}]",
            lambda: f"({inner()})|{rng.choice(FILTERS)}",
            lambda: f"({inner()} == {inner()})",
            lambda: f"({inner()} in {inner()})",
            lambda: f"{{'a': {inner()}}}",
        ]
    )()


def template(rng):
    count, start = rng.choice([10, 60, 5000, 90_000]), rng.choice(["'a'", "[]", "[1]", "{}", "'a' * 1000"])
    body = "".join(
        rng.choice(
            [
                "{% set ns.s = " + expression(rng) + " %}",
                "{{ " + expression(rng) + " }}",
                "{% if " + expression(rng) + " %}x{% endif %}",
            ]
        )
        for _ in range(rng.choice([1, 1, 2, 3]))
    )
    return (
        "{% set ns = namespace(s="
        + start
        + ") %}{% for i in range("
        + str(count)
        + ") %}"
        + body
        + "{% endfor %}{{ "
        + expression(rng)
        + " }}"
    )


def attack(area):
    model = lambda text: model_folder(area, "model", DEMO, **{"chat_template.jinja": text})
    render = lambda text: area.run(
        "generate", model(text), "Hello", "--chat", "--max-tokens", 2, "--threads", 1, timeout=30
    )
    plain = render((DEMO / "chat_template.jinja").read_text())
    area.check("the demo's own", plain.problem(codes=(0,)), str(plain))
    for name, text in LIST.items():
        result = render(text)
        area.check(
            name,
            result.problem(10, 1024),
            f"{text[:600]}\n{result}",
            keep=area.dir / "model" / "chat_template.jinja" if len(text) < 1_000_000 else None,
        )
    for name in (
        "nested, dropped",
        "doubling: ns.s ~ ns.s",
        "once: [1]|batch(10**10, 'x')|list",
        "both, shown",
        "deep: +1",
    ):
        served(area, name, model(LIST[name]))
    while area.time():
        text = template(area.random)
        result = render(text)
        area.check(
            "a random one",
            result.problem(10, 1024),
            f"{text}\n{result}",
            keep=area.dir / "model" / "chat_template.jinja",
        )


def served(area, name, path):
    """A server with such a template: chats are refused, the rest goes on."""
    try:
        with area.serve(model=path) as server:
            try:
                reply = server.ask("/v1/chat/completions", chat("Hello"), timeout=30)
                problem = reply.status >= 500 and f"status {reply.status}"
            except FAILURES as failure:
                problem = repr(failure)
            other = (
                ""
                if server.problem()
                else server.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status != 200
                and "completions are not answered"
            )
            area.check(f"served: {name}", server.problem() or problem or other, f"{server.line}\n{LIST[name][:500]}")
    except RuntimeError as refused:  # at the start, which is as good, in words
        area.check(f"served: {name}", "error: " not in str(refused) and str(refused), LIST[name][:500])
