"""The `moebius` command."""

import signal
import sys

from moebius import _moebius


def main() -> int:
    # The command has its own ways with Ctrl-C; Python's handler would only note it, and never run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _moebius.main(sys.argv)
