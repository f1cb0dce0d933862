"""Hosts action handlers for a Relay broker on this machine."""

from .connection import Connection, connection_file, read_connection
from .drive import Drive
from .errors import RunnerError
from .session import Handler, HandlerContext, Session

__all__ = [
    "Connection",
    "Drive",
    "Handler",
    "HandlerContext",
    "Runner",
    "RunnerError",
    "Session",
    "connection_file",
    "read_connection",
]


def __getattr__(name: str) -> object:
    # The only module that needs the WebSocket library.
    if name == "Runner":
        from .runner import Runner

        return Runner
    raise AttributeError(name)
