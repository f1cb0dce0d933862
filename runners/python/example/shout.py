"""Hosts one action and drives an agent: `python shout.py` in the broker's directory, or with the path of a connection
file as its argument. Ends on SIGTERM or Ctrl-C."""

import asyncio
import signal
import sys

from relay_runner import HandlerContext, Runner


async def shout(input: dict, context: HandlerContext) -> dict:
    return {"text": str(input["text"]).upper()}


async def main() -> None:
    manifest = {"name": "example", "capabilities": [{"name": "shout", "kind": "action"}]}
    runner = Runner(manifest, {"shout": shout}, sys.argv[1] if len(sys.argv) > 1 else None)
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
