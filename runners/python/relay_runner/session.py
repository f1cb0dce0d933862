"""One connection to the broker: requests and their answers, calls of handlers and their results."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RunnerError, disconnected

VERSION = 2
# Largest output of a handler, and largest frame; the broker closes the socket of a runner that sends a larger one.
MAX_OUTPUT = 768 << 10
MAX_FRAME = 1 << 20
# Longest error of a handler, in characters.
MAX_ERROR = 4096
logger = logging.getLogger("relay_runner")

Json = Any
Send = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class HandlerContext:
    """Circumstances of one call of a handler. A call that is not waited for any more is cancelled as a task."""

    invocation_id: str
    session: Session


Handler = Callable[[Json, HandlerContext], Awaitable[Json]]


class Session:
    def __init__(self, send: Send, handlers: Mapping[str, Handler]) -> None:
        self._send = send
        self._handlers = handlers
        self._last_request = 0
        self._waiting: dict[str, asyncio.Future[Json]] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._is_open = True

    async def register(self, client_name: str, client_version: str, manifest: Mapping[str, Json]) -> None:
        """Registers the manifest, then the handlers."""
        await self.request("hello", {"client_name": client_name, "client_version": client_version})
        await self.request("register_node", {"manifest": manifest})
        await self.request("register_handlers", {"names": list(self._handlers)})

    async def deregister(self) -> None:
        """Withdraws manifest and handlers; the broker then closes the socket."""
        await self.request("deregister_node", {})

    async def request(self, kind: str, payload: Mapping[str, Json]) -> Json:
        """Sends a request and returns its result."""
        if not self._is_open:
            raise disconnected()
        self._last_request += 1
        request_id = str(self._last_request)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        try:
            text = encode({"v": VERSION, "type": kind, "request_id": request_id, "payload": payload})
            if len(text.encode()) > MAX_FRAME:
                raise RunnerError("frame_too_large", f"the request {kind} is larger than 1 MiB", False)
            await self._send(text)
            return await answer
        finally:
            self._waiting.pop(request_id, None)

    async def spawn(
        self,
        agent: Mapping[str, Json],
        *,
        task: str | None = None,
        skip_relay_prompt: bool | None = None,
        invocation_id: str | None = None,
    ) -> Json:
        """Starts an agent. An invocation names the call that the agent is born under."""
        optional = {"initial_task": task, "skip_relay_prompt": skip_relay_prompt, "invocation_id": invocation_id}
        given = {key: value for key, value in optional.items() if value is not None}
        return await self.request("spawn_agent", {"agent": agent, **given})

    async def send_message(self, to: str, text: str, **more: Json) -> Json:
        """Sends a message; further fields are those of `POST /api/send`."""
        return await self.request("send_message", {"to": to, "text": text, **more})

    async def list_agents(self) -> list[dict[str, Json]]:
        return (await self.request("list_agents", {}))["agents"]

    def on_text(self, text: str) -> None:
        """Takes a text frame of the broker."""
        frame = decode(text)
        if frame is None:
            logger.warning("not a frame: %.200s", text)
            return
        kind, payload = frame["type"], frame["payload"]
        if kind == "ok":
            self._answer(frame, lambda answer: answer.set_result(payload.get("result")))
        elif kind == "error":
            error = RunnerError(str(payload.get("code")), str(payload.get("message")), payload.get("retryable") is True)
            if not self._answer(frame, lambda answer: answer.set_exception(error)):
                logger.warning("the broker reports %s: %s", error.code, error)
        elif kind == "invoke_handler":
            if isinstance(payload.get("invocation_id"), str) and isinstance(payload.get("name"), str):
                self._call(payload["invocation_id"], payload["name"], payload.get("input"))
        elif kind == "cancel_handler":
            call = self._calls.pop(str(payload.get("invocation_id")), None)
            if call:
                call.cancel(str(payload.get("reason")))
        # Other kinds are of later brokers.

    def on_close(self) -> None:
        """The socket has closed: nothing is answered or waited for any more."""
        self._is_open = False
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(disconnected())
        for call in self._calls.values():
            call.cancel("disconnected")
        self._calls.clear()

    def _answer(self, frame: Mapping[str, Json], settle: Callable[[asyncio.Future[Json]], None]) -> bool:
        answer = self._waiting.pop(frame.get("request_id", ""), None)
        if answer is None or answer.done():
            return False
        settle(answer)
        return True

    def _call(self, invocation_id: str, name: str, input: Json) -> None:
        # The broker gives an invocation again when it does not know that it runs.
        if invocation_id not in self._calls:
            call = self._run(invocation_id, name, input)
            self._calls[invocation_id] = asyncio.get_running_loop().create_task(call, name=f"handler {name}")

    async def _run(self, invocation_id: str, name: str, input: Json) -> None:
        outcome: dict[str, Json]
        try:
            handler = self._handlers.get(name)
            if handler is None:
                raise RunnerError("handler_unavailable", "handler_unavailable", False)
            output = await handler(input, HandlerContext(invocation_id, self))
            # Before the result is sent: a result that cannot be sent would never end the invocation.
            if len(encode(output).encode()) > MAX_OUTPUT:
                raise RunnerError("output_too_large", "output_too_large", False)
            outcome = {"output": output}
        except Exception as error:
            outcome = {"error": describe(error)}
        # A cancelled call has its end already.
        if self._calls.pop(invocation_id, None) is None:
            return
        try:
            await self.request("handler_result", {"invocation_id": invocation_id, **outcome})
        except RunnerError as error:
            logger.warning("the result of %s was not taken: %s", name, error)


def encode(value: Json) -> str:
    """Writes JSON as it is read everywhere: without NaN, and with `?` for the halves of a character."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def describe(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text[:MAX_ERROR]


def decode(text: str) -> dict[str, Json] | None:
    """Reads a frame; `None` for anything else."""
    try:
        frame = json.loads(text)
    except ValueError:
        return None
    if not isinstance(frame, dict) or frame.get("v") != VERSION:
        return None
    is_frame = isinstance(frame.get("type"), str) and isinstance(frame.get("payload"), dict)
    return frame if is_frame else None
