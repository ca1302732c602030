"""Work that grows faster than what is asked. It is counted in seconds of a core, so that other work on the machine
does not matter."""

from common import ask, together

ALLOWED = 8  # times the time for four times the work; linear is 4, quadratic is 16
LEAST_S = 0.3  # below it nobody minds


def cost(server, path, body):
    """Seconds of a core that a request takes, and how it is answered."""
    costs = []
    for _ in range(3):
        before = server.cpu_s()
        status = server.ask(path, body, timeout=120).status
        costs.append(server.cpu_s() - before)
    return min(costs), status


def tell(area, server, name, request, problem, small, large):
    area.check(
        name,
        large[1] >= 500 and f"status {large[1]}" or problem,
        f"{server.line}\n{request[0]} {str(request[1])[:500]}",
    )
    area.note(f"{name}: {small[0]:.2f} s, {large[0]:.2f} s; status {large[1]}")


def growth(area, server, name, request):
    """`request(n)`: path and body of a work of size n, 1 or 4."""
    small, large = cost(server, *request(1)), cost(server, *request(4))
    problem = (
        large[0] > max(LEAST_S, ALLOWED * max(small[0], 0.02))
        and f"{small[0]:.2f} s of a core, four times as much {large[0]:.2f}"
    )
    tell(area, server, name, request(4), problem, small, large)


def beside(area, server, name, plain, **more):
    """An answer as long as `plain`, with something more; attention alone makes the time of a long answer grow with
    its square."""
    request = say(**more)
    large = cost(server, *request)
    problem = (
        large[0] > 1.2 * plain[0] + 0.1 and f"{large[0]:.2f} s of a core, an answer of words as long {plain[0]:.2f}"
    )
    tell(area, server, name, request, problem, plain, large)


def say(**more):
    return "/v1/completions", {"prompt": "Hi", "ignore_eos": True, "max_tokens": 3800, **more}


def half_token(server):
    """A token that is half a character."""
    texts = ask(server.port, "/tokenize", {"prompt": "é漢", "return_token_strs": True}).json()
    return texts["tokens"][0]


def attack(area):
    with area.serve() as server:
        half = half_token(server)
        halves = {"logit_bias": {str(half): 100}}
        plain = cost(server, *say())
        beside(area, server, "an answer of half characters", plain, **halves)
        beside(area, server, "the same, streamed", plain, stream=True, **halves)
        beside(area, server, "half characters with stop strings", plain, stop=["never", "\ufffd" * 200 + "x"], **halves)
        beside(area, server, "half characters with logprobs", plain, logprobs=5, **halves)
        beside(
            area, server, "stop strings that nearly come", plain, logit_bias={"97": 100}, stop=["a" * 1000 + "b"] * 16
        )
        beside(area, server, "penalties", plain, repetition_penalty=1.3, presence_penalty=1, frequency_penalty=1)
        for name, piece in (
            ("digits", "1234567890"),
            ("one letter", "a"),
            ("marks", "e\u0301"),
            ("blanks", " "),
            ("quotes", "'\""),
            ("special", "<|end|>"),
            ("half special", "<|en"),
        ):
            growth(
                area,
                server,
                f"/tokenize of {name}",
                lambda n, piece=piece: ("/tokenize", {"prompt": piece * (n * 200_000 // len(piece))}),
            )
        growth(area, server, "/detokenize", lambda n: ("/detokenize", {"tokens": [half] * (n * 50_000)}))
        growth(
            area,
            server,
            "/detokenize of noise",
            lambda n: ("/detokenize", {"tokens": [area.random.randrange(10, 1000) for _ in range(n * 50_000)]}),
        )
        growth(
            area,
            server,
            "choices under one grammar",
            lambda n: (
                "/v1/completions",
                {
                    "prompt": ["a"] * 4 * n,
                    "n": 4,
                    "max_tokens": 1,
                    "guided_json": {"enum": [f"word {i}" for i in range(2000)]},
                },
            ),
        )
        growth(
            area,
            server,
            "messages",
            lambda n: (
                "/v1/chat/completions",
                {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * (200 * n)},
            ),
        )
        growth(
            area,
            server,
            "tools",
            lambda n: (
                "/v1/chat/completions",
                {
                    "max_tokens": 1,
                    "messages": [{"role": "user", "content": "a"}],
                    "tools": [
                        {"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(60 * n)
                    ],
                },
            ),
        )
        growth(
            area,
            server,
            "a JSON string under a schema",
            lambda n: (
                "/v1/completions",
                {"prompt": "Hi", "max_tokens": 220 * n, "guided_json": {"type": "string", "minLength": 3000}},
            ),
        )
        together(8, lambda i: server.ask(*say(**halves), timeout=120))
        area.check("eight answers of half characters", server.problem(), server.line)
