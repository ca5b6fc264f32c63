"""launch/store.py: its flags, and the addresses on which it listens."""

import re
import socket
import sys

import pytest
from processes import ROOT

from common.distributed import free_port
from launch import store


def port_of(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["store.py", *given])
    return store.parse_args().port


def test_the_default_port_is_that_of_the_launch_file(monkeypatch):
    text = (ROOT / "launch/06_elastic.sh").read_text()
    assert port_of(monkeypatch) == int(re.search(r"STORE:-[\d.]+:(\d+)}", text)[1])


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_that_does_not_exist_is_refused(monkeypatch, port):
    expected = f"^store.py: error: argument --port: found {port}, expected 1 to 65535$"
    with pytest.raises(SystemExit, match=expected):
        port_of(monkeypatch, "--port", port)
    assert port_of(monkeypatch, "--port", "1") == 1
    assert port_of(monkeypatch, "--port", "65535") == 65535


@pytest.mark.parametrize("dual", [True, False])
def test_both_kinds_of_addresses_are_bound_where_there_are_both(monkeypatch, dual):
    """Both kinds of addresses are bound where the machine has both."""
    if dual and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has IPv4 alone")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual)
    port = free_port()
    with store.bind(port) as bound:
        assert bound.family == (socket.AF_INET6 if dual else socket.AF_INET)
        bound.listen()
        hosts = ["127.0.0.1", "::1"] if dual else ["127.0.0.1"]
        for host in hosts:
            socket.create_connection((host, port), timeout=10).close()
