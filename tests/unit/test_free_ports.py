"""Ports for the servers of tests: nobody has them, and no client gets them by chance."""

from __future__ import annotations

import socket

from support.servers import process


def test_a_port_that_somebody_has_is_not_given(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = process.free_port()
        drawn = iter([port, free])
        monkeypatch.setattr(process.secrets, "choice", lambda ports: next(drawn))
        assert process.free_port() == free


def test_the_port_above_is_looked_at_too(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        below = taken.getsockname()[1] - 7
        free = process.free_port(also_above=7)
        drawn = iter([below, free])
        monkeypatch.setattr(process.secrets, "choice", lambda ports: next(drawn))
        assert process.free_port(also_above=7) == free


def test_ports_are_not_those_of_clients() -> None:
    """A client's port could be taken between the choice and the server's start."""
    assert all(10_000 <= process.free_port(also_above=10_000) < 22_000 for _ in range(100))
