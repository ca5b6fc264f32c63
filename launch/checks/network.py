"""Whether machines can connect to each other, at the addresses where the backends will listen."""

import contextlib
import os
import socket
import threading
from typing import NamedTuple


class Listener:
    """Listen where a backend will, and send this machine's name to every process that connects.

    Args:
        host: str, the name of this machine.
        address: str.
    """

    def __init__(self, host, address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.name = f"{host} {os.getpid()}"
        self.socket = socket.create_server((address, 0), family=family)
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self.socket.accept()
                with connection:
                    connection.sendall(self.name.encode())


class Attempt(NamedTuple):
    """A connection from one machine to another."""

    source: str
    target: str
    backend: str
    address: str
    error: str | None  # None: it worked


def connect_to_all(listeners, source):
    """Connect from this machine to every other, all at once.

    Args:
        listeners: {host: {backend: (address, port, name)}}.
        source: str, this machine.

    Returns:
        sorted list of Attempt.
    """
    attempts = []

    def attempt(target, backend, address, port, name):
        error = connection_error(address, port, name)
        attempts.append(Attempt(source, target, backend, address, error))

    threads = [
        threading.Thread(target=attempt, args=(host, backend, *where))
        for host, backends in listeners.items()
        if host != source
        for backend, where in backends.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(attempts)


def connection_error(address, port, name):
    """Connect to a Listener. Return what went wrong, or None."""
    try:
        # seconds, to connect and to wait for an answer
        with socket.create_connection((address, port), timeout=4) as connection:
            answer = connection.recv(300).decode(errors="replace")
    except OSError as error:
        return str(error)
    return None if answer == name else f"{answer or 'nobody'} answers there"
