"""pure. Connections that carry messages between ranks, and how ranks find rank 0."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_MAX_MESSAGE_BYTES = 1 << 16
_CONNECT_SECONDS = 30.0
_OTHER_FILES = 768
"""Files that a rank may have open beside its connections to the others."""
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    # A data worker that outlives its rank would hold the rank's connection open.
    for inherited in list(_open_sockets):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)


class Connection:
    """A TCP connection that carries messages, each a line of JSON."""

    def __init__(self, connected: socket.socket) -> None:
        self.rank: int | None = None
        """Rank at the other end; None until it has said so."""
        self._socket, self._rest = connected, b""
        self._sending = threading.Lock()
        _open_sockets.add(connected)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Returns the file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, **message: object) -> None:
        """Sends a message, or does nothing if the other end is gone. It does not wait: messages are
        few and short, and fit into the buffer of a process that is stopped.
        """
        with self._sending, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have come; None if the other end is gone, or is no rank."""
        try:
            received = self._socket.recv(_MAX_MESSAGE_BYTES)
            *lines, self._rest = (self._rest + received).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError):
            return None
        is_from_rank = all(isinstance(message, dict) for message in messages)
        is_from_rank &= len(self._rest) < _MAX_MESSAGE_BYTES
        return messages if received and is_from_rank else None

    def close(self) -> None:
        """Closes the connection. The other end still receives what was sent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


def listen(num_ranks: int) -> socket.socket:
    """Returns a socket to which the other ranks connect, at all addresses of this machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_ranks + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:  # 1024 is usual
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=num_ranks, dualstack_ipv6=True
        )
    except (OSError, ValueError):  # this machine has no IPv6
        listener = socket.create_server(("", 0), backlog=num_ranks)
    _open_sockets.add(listener)
    return listener


def machine_names(store_host: str) -> list[str]:
    """Returns names under which other ranks may reach this machine, the likeliest first: its
    address towards the host of the store, which all ranks reach.
    """
    names = [socket.gethostname()]
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = probe.getsockname()[0]
        # Where the store is on this machine, the address may be 127.0.0.1: others know the name.
        names.insert(0, store_host if own == place[0] else own)
    return names


def connect(rank: int, names: Sequence[str], port: int) -> Connection:
    """Returns a connection to rank 0. Raises ValueError if none of the names leads there."""
    errors = []
    for name in names:
        try:
            connected = socket.create_connection((name, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            errors.append(f"{name}: {error}")
            continue
        connected.settimeout(None)
        return Connection(connected)
    raise ValueError(
        f"rank {rank} cannot reach rank 0 at port {port} ({'; '.join(errors)}); ranks need TCP "
        "connections to one another: see the names and firewalls of their machines"
    )
