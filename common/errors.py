"""What a user sees when something is wrong: one line, and never a traceback for a mistake of theirs."""

import contextlib
import os
import signal
import sys


class UserError(Exception):
    """A mistake of the user: one line that says what was found, what was expected and what works."""


@contextlib.contextmanager
def one_line_errors():
    """Turn a user's mistake into one line on stderr and exit code 2, Ctrl-C into one line and code 130."""
    program = os.path.basename(sys.argv[0])
    try:
        yield
    except UserError as error:
        # A DataLoader worker wraps its error into the text of a traceback, whose last line is the message.
        message = str(error).splitlines()[-1].rpartition("UserError: ")[-1]
        print(f"{program}: error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not break the tidying up
        print(f"\n{program}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
