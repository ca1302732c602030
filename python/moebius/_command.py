"""The `moebius` command."""

import signal
import sys

from moebius import _moebius


def main() -> int:
    # The command handles Ctrl-C itself; Python's handler would only record it, and never run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _moebius.main(sys.argv)
