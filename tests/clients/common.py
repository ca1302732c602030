"""What the files beside this one share: where the servers are, and a runner of plain functions.

MOEBIUS_URL: a server with the demo model. MOEBIUS_TOOLS_URL: the same model with a template that has tools.
MOEBIUS_KEYED_URL: a server that wants the key "sesame", runs one request and lets one wait.
"""

import asyncio
import contextlib
import inspect
import os
import sys
import time
import traceback
import urllib.request

URL = os.environ["MOEBIUS_URL"]
TOOLS_URL = os.environ["MOEBIUS_TOOLS_URL"]
KEYED_URL = os.environ["MOEBIUS_KEYED_URL"]
KEY = "sesame"

QUESTION = "What is 2+2?"
ANSWER = "2 + 2 = 4"

# A tool whose arguments cannot be long, so that a model that knows no tools comes to the end of a forced call.
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Tokyo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}


def is_weather(arguments):
    return (
        set(arguments) == {"city", "days"} and arguments["city"] in ("Paris", "Tokyo") and 1 <= arguments["days"] <= 9
    )


@contextlib.contextmanager
def refused(kind, **fields):
    """The block must raise `kind`; `fields` are what its attributes must be."""
    try:
        yield
    except kind as error:
        for name, value in fields.items():
            assert getattr(error, name) == value, f"{name} is {getattr(error, name)!r}, not {value!r}: {error}"
        return
    raise AssertionError(f"no {kind.__name__}")


def metric(url, name, key=None):
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
    lines = urllib.request.urlopen(request).read().decode().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"moebius_{name} ")))


def wait_for(what, seconds=20):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.01)


def run(names):
    """Calls every function of `names` that is called test_*, and says what failed."""
    tests = [f for name, f in names.items() if name.startswith("test_")]
    failed = 0
    for test in tests:
        try:
            asyncio.run(test()) if inspect.iscoroutinefunction(test) else test()
        except Exception:
            failed += 1
            print(f"--- {test.__name__}", file=sys.stderr)
            traceback.print_exc()
    print(f"{len(tests) - failed} of {len(tests)} passed")
    sys.exit(1 if failed or not tests else 0)
