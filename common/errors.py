"""Errors as one line: what was found, what was expected, and the command that works.

ddp/errors.py has more, for several processes.
"""

import contextlib
import multiprocessing
import os
import sys


class UserError(Exception):
    """A mistake of the user. The message is one line and says what to do."""


@contextlib.contextmanager
def one_line_errors():
    """Report a user's mistake in one line, with exit code 2, and Ctrl-C in one, with 130.

    Other errors keep their traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        exit_now("stopped by Ctrl-C", 130)
    except UserError as error:
        print_line(f"error: {message_of(error)}")
        sys.exit(2)


def message_of(error):
    """Return the message of a UserError.

    That of an error in a loader worker is a whole traceback, whose last line is the error.
    """
    return str(error).splitlines()[-1].rpartition("UserError: ")[-1]


def one_line(error):
    """Return the text of an exception on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def print_line(message):
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)


def exit_now(message, code):
    """Print a message, kill the processes that this one started, and exit without cleaning up."""
    if message:
        print_line(message)
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
