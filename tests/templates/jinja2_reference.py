"""What Jinja makes of chat templates, set up as Hugging Face transformers sets it up (utils/chat_template_utils.py).

Reads JSON from stdin: {"templates": [SOURCE, ..], "variables": [{..}, ..]}. Writes a list: of each template and each
set of variables {"text": TEXT}, {"refused": MESSAGE} where the template refuses in its own words, or {"broken": ERROR}.
"""

import json
import sys
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(Exception):
    pass


def raise_exception(message):
    raise Refused(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Generation(Extension):
    """The block that marks the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def render(template, variables):
    try:
        return {"text": template.render(**variables)}
    except Refused as refused:
        return {"refused": str(refused)}
    except Exception as error:
        return {"broken": f"{type(error).__name__}: {error}"}


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

asked = json.load(sys.stdin)
templates = [env.from_string(source) for source in asked["templates"]]
json.dump([[render(template, variables) for variables in asked["variables"]] for template in templates], sys.stdout)
