"""Free ports: none that an outgoing connection may be given, and none that is taken."""

import socket

from controlplane.embedded import ports
from controlplane.embedded.ports import FIRST_PORT, LOOPBACK, PORTS, free_port, port_is_free


def test_a_free_port_is_outside_of_what_the_kernel_hands_out():
    found = {free_port() for _ in range(20)}
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS and port_is_free(port) for port in found)
    assert len(found) > 1, "two that ask at once are told different ones"


def test_one_that_is_taken_is_passed_over_and_where_all_are_the_kernel_chooses(monkeypatch):
    taken = free_port()
    monkeypatch.setattr(ports, "FIRST_PORT", taken)
    monkeypatch.setattr(ports, "PORTS", 1)
    with socket.create_server((LOOPBACK, taken)):
        other = free_port()
        assert other != taken and port_is_free(other)
    assert free_port() == taken
