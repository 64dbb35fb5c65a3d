"""The command ``modelyard``, and ``python -m modelyard``."""

import signal
import sys


def main() -> None:
    """Runs the command line. Ctrl-C ends it quietly, also while its modules are imported."""
    try:
        from modelyard.cli.app import main as command_line
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    command_line()


if __name__ == "__main__":
    main()
