"""Hosts two actions, one of which drives an agent: `python shout.py` in the broker's directory, or with the path of a
connection file as its argument. Ends on SIGTERM or Ctrl-C."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

from relay_runner import HandlerContext, Runner, Session


async def shout(input: dict, context: HandlerContext) -> dict:
    return {"text": str(input["text"]).upper()}


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    # A call that is not waited for any more is cancelled.
    while not await check():
        await asyncio.sleep(0.05)


async def dictate(runner: Runner, input: dict, session: Session) -> dict:
    """Starts an agent and types for it while a message waits, then lets the message through."""
    name, keys, text = input["name"], input["keys"], input["text"]
    await session.spawn({"name": name, "cli": "cat"})
    drive = await runner.drive(name)
    await session.send_message(name, text)

    async def waits() -> bool:
        return text in [message["body"] for message in await drive.pending()]

    async def shows(expected: str) -> bool:
        return expected in await drive.screen()

    await until(waits)
    await drive.type(f"{keys}\r")
    await until(lambda: shows(keys))
    before = await drive.screen()
    flushed = await drive.flush()
    await until(lambda: shows(text))
    await drive.end()
    return {"before": before, "after": await drive.screen(), "flushed": flushed}


async def main() -> None:
    names = ["shout", "dictate"]
    manifest = {"name": "example", "capabilities": [{"name": name, "kind": "action"} for name in names]}
    handlers = {"shout": shout, "dictate": lambda input, context: dictate(runner, input, context.session)}
    runner = Runner(manifest, handlers, sys.argv[1] if len(sys.argv) > 1 else None)
    await runner.start()
    print("registered", flush=True)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for kind in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(kind, stopping.set)
    await stopping.wait()
    await runner.stop()
    print(await runner.ended(), flush=True)


asyncio.run(main())
