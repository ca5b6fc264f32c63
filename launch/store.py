"""Keep the store at which the torchruns of launch/06_elastic.sh meet, until it is ended.

    python launch/store.py                  on port 29400
    python launch/store.py --port 29401

torchrun would keep it in one of the machines that train, and all would end with that one. Here no machine that trains
is indispensable. The store needs no GPU and hardly any memory: a login machine will do. It holds no checkpoints, so
when it is lost, start it again: the torchruns meet anew and go on.
"""

import argparse
import signal
import socket
import sys


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--port", type=int, default=29400, metavar="N", help="where to listen (default: 29400)")
    args = parser.parse_args()
    if not 1 <= args.port <= 65535:
        fail(f"argument --port: {args.port} given, expected 1 to 65535")
    return args


def fail(message):
    sys.exit(f"store.py: error: {message}")


def bind(port):
    """A socket for all addresses of this machine; made here, as what torch says of a taken port takes a page.

    It does not listen yet: whoever came in before the store answers would hang, and the store too.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    bound = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # A store that is started again is not kept waiting by connections of the one before it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", port))
    except OSError as error:
        fail(f"port {port}: {error.strerror}; end what has it (ss -ltnp), or name another: store.py --port N")
    return bound


def main(args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    bound = bind(args.port)
    from torch.distributed import TCPStore  # seconds, which a port that is taken need not wait for

    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # they wait for sigwait
    store = TCPStore("localhost", args.port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach())
    print(f"store: {socket.gethostname()}:{store.port}, until Ctrl-C", flush=True)
    signal.sigwait(ends)


if __name__ == "__main__":
    main(parse_args())
