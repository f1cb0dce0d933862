"""Control of one agent's terminal."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from .connection import Connection
from .errors import RunnerError

# The broker is on this machine.
_opener = build_opener(ProxyHandler({}))


class Drive:
    """An agent that is driven: its messages wait until they are flushed, and keys are typed for it."""

    def __init__(self, connection: Connection, name: str, mode_before: str) -> None:
        self._connection = connection
        self._path = quote(name, safe="")
        self._mode_before = mode_before

    @classmethod
    async def begin(cls, connection: Connection, name: str) -> Drive:
        """Begins to drive an agent: its messages are held."""
        path = f"/api/spawned/{quote(name, safe='')}/delivery-mode"
        before = await call(connection, "GET", path)
        await call(connection, "PUT", path, {"mode": "manual_flush"})
        return cls(connection, name, before["mode"])

    async def type(self, keys: str) -> None:
        """Types keys, as they are. Returns when the terminal has taken them."""
        await call(self._connection, "POST", f"/api/input/{self._path}", {"data": keys})

    async def screen(self) -> str:
        return (await call(self._connection, "GET", f"/api/spawned/{self._path}/snapshot"))["screen"]

    async def pending(self) -> list[dict[str, Any]]:
        return (await call(self._connection, "GET", f"/api/spawned/{self._path}/pending"))["pending"]

    async def flush(self) -> int:
        """Lets the messages through that wait now. Returns their number."""
        return (await call(self._connection, "POST", f"/api/spawned/{self._path}/flush"))["flushed"]

    async def end(self) -> None:
        """Ends the control: the mode is as before."""
        path = f"/api/spawned/{self._path}/delivery-mode"
        await call(self._connection, "PUT", path, {"mode": self._mode_before})


async def call(connection: Connection, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Calls the listen API."""
    return await asyncio.to_thread(_call, connection, method, path, body)


def _call(connection: Connection, method: str, path: str, body: dict[str, Any] | None) -> Any:
    headers = {"x-api-key": connection.api_key, "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = Request(connection.url + path, data=data, headers=headers, method=method)
    try:
        with _opener.open(request, timeout=30) as response:
            return json.loads(response.read())
    except HTTPError as error:
        try:
            answer = json.loads(error.read())
        except ValueError:
            answer = {}
        code = answer.get("code", f"http_{error.code}")
        raise RunnerError(code, answer.get("message", error.reason), error.code >= 500) from None
