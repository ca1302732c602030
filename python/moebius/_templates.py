"""The program of the child processes that render chat templates. It does not import the package, which takes long."""

import sys
from importlib import import_module
from os.path import dirname


def command(extension: str) -> list[str]:
    """The command line of such a process. `extension` is the file of the extension module."""
    return [sys.executable or "python3", "-I", "-S", __file__, dirname(extension)]


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    sys.exit(import_module("_moebius").render_templates())
