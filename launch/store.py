"""Run the store at which the torchruns of launch/06_elastic.sh rendezvous, until it is stopped.

    python launch/store.py                  on port 29400
    python launch/store.py --port 29401

By default torchrun runs the store on one of the machines that train, and all machines fail with
that one. With this store, any machine that trains may fail. The store needs no GPU and little
memory, so a login machine will do. It holds no checkpoints: if it is lost, start it again, and the
torchruns rendezvous again and continue.
"""

import argparse
import signal
import socket
import sys


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--port", type=int, default=29400, metavar="N", help="port to listen on (default: 29400)"
    )
    args = parser.parse_args()
    if not 1 <= args.port <= 65535:
        fail(f"argument --port: found {args.port}, expected 1 to 65535")
    return args


def fail(message):
    sys.exit(f"store.py: error: {message}")


def bind(port):
    """Return a socket bound to a port on all addresses of this machine.

    torch could bind the port too, but reports a port in use with a page of C++ stack. The socket
    does not listen yet: a client that connects before the store answers would hang, and the store
    with it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    bound = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # A restarted store need not wait until the old store's connections have timed out.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", port))
    except OSError as error:
        fail(
            f"port {port}: {error.strerror}; "
            "stop the process that uses it (ss -ltnp), or run store.py --port N"
        )
    return bound


def main(args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    bound = bind(args.port)
    from torch.distributed import TCPStore  # takes seconds, so check the port first

    stop_signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)  # sigwait receives them
    store = TCPStore(
        "localhost",
        args.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=bound.detach(),
    )
    print(f"store: {socket.gethostname()}:{store.port}, until Ctrl-C", flush=True)
    signal.sigwait(stop_signals)


if __name__ == "__main__":
    main(parse_args())
