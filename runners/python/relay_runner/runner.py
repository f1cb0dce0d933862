"""A runner: a session that is opened again when it breaks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Literal

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from .connection import Connection, read_connection
from .drive import Drive
from .errors import RunnerError, disconnected
from .session import Handler, Session, logger

CLIENT_NAME = "relay-runner-python"
CLIENT_VERSION = "0.1.0"
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 5.0
# Close code of a runner whose place another has taken.
SUPERSEDED = 4001

End = Literal["stopped", "superseded"]


class Runner:
    """Hosts handlers. `connection` is a broker, or the path of its connection file."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        handlers: Mapping[str, Handler],
        connection: Connection | str | os.PathLike[str] | None = None,
    ) -> None:
        self._manifest = manifest
        self._handlers = handlers
        self._connection_of = connection
        self._session: Session | None = None
        self._socket: ClientConnection | None = None
        self._is_stopping = False
        self._task: asyncio.Task[End] | None = None

    async def start(self) -> None:
        """Connects and registers. From then on a lost connection is opened again."""
        reader = await self._connect()
        self._task = asyncio.create_task(self._serve(reader), name="relay runner")

    async def stop(self) -> None:
        """Withdraws everything and disconnects."""
        self._is_stopping = True
        try:
            if self._session:
                await self._session.deregister()
        finally:
            if self._socket:
                await self._socket.close()
            elif self._task:
                self._task.cancel()

    async def ended(self) -> End:
        """Returns when the runner does not reconnect any more."""
        assert self._task, "the runner was not started"
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled():
                return "stopped"
            raise

    @property
    def session(self) -> Session:
        """The session of this moment, for requests outside of handlers."""
        if self._session is None:
            raise disconnected()
        return self._session

    async def drive(self, name: str) -> Drive:
        """Takes control of an agent's terminal."""
        return await Drive.begin(self._connection(), name)

    def _connection(self) -> Connection:
        # Read again for each connection: a broker that was restarted has another port.
        given = self._connection_of
        return given if isinstance(given, Connection) else read_connection(given)

    async def _connect(self) -> asyncio.Task[int]:
        connection = self._connection()
        url = connection.url.replace("http", "ws", 1) + "/api/fleet/ws"
        socket = await connect(url, additional_headers={"x-api-key": connection.api_key}, proxy=None)
        session = Session(socket.send, self._handlers)
        reader = asyncio.create_task(_read(socket, session), name="relay runner socket")
        try:
            await session.register(CLIENT_NAME, CLIENT_VERSION, self._manifest)
        except BaseException:
            await socket.close()
            raise
        self._session, self._socket = session, socket
        return reader

    async def _serve(self, reader: asyncio.Task[int]) -> End:
        pause = FIRST_PAUSE
        current: asyncio.Task[int] | None = reader
        while True:
            if current:
                code = await current
                self._session = self._socket = None
                if self._is_stopping:
                    return "stopped"
                if code == SUPERSEDED:
                    return "superseded"
                logger.warning("the broker has closed the connection (%s)", code)
            await asyncio.sleep(pause)
            try:
                current = await self._connect()
                pause = FIRST_PAUSE
            except (OSError, ValueError, WebSocketException, RunnerError) as error:
                logger.warning("the broker cannot be reached: %s", error)
                current = None
                pause = min(pause * 2, LONGEST_PAUSE)


async def _read(socket: ClientConnection, session: Session) -> int:
    """Reads until the end and returns the close code."""
    try:
        async for message in socket:
            if isinstance(message, str):
                session.on_text(message)
    except ConnectionClosed:
        pass
    finally:
        session.on_close()
    return socket.close_code or 1006
