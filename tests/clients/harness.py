"""What the scripts share: checks that are printed, requests to the test that runs them, waits."""

import asyncio
import json
import sys
import time


def check(claim, holds, shown=None):
    """Prints the claim, or ends the script when it does not hold."""
    if holds:
        print(f"ok      {claim}")
        return
    print(f"FAILED  {claim}: {shown!r}")
    sys.exit(1)


def same(claim, actual, expected):
    """Checks that two values are equal."""
    check(claim, actual == expected, (actual, "expected", expected))


async def refused(claim, status, code, call):
    """Checks that a call is refused with this status and code."""
    from relay_sdk import RelayError

    try:
        answer = await call
    except RelayError as error:
        same(f"{claim} ({code})", (error.status, error.code), (status, code))
        return
    check(claim, False, answer)


async def until(claim, condition, shown=lambda: None, seconds=40):
    """Waits until `condition` holds; `shown` tells what there was instead."""
    end = time.monotonic() + seconds
    while True:
        holds = condition()
        if asyncio.iscoroutine(holds):
            holds = await holds
        if holds:
            break
        if time.monotonic() > end:
            check(claim, False, shown())
        await asyncio.sleep(0.025)
    check(claim, True)


async def ask(request):
    """Asks the test that runs this script to do something, and waits until it is done."""
    print(f"@{request}", flush=True)
    answer = await asyncio.to_thread(sys.stdin.readline)
    same(f'the test did "{request}"', answer.strip(), "done")


async def report(posts):
    """Gives the test the posts, as (text, id), for the rules of all histories."""
    await ask(json.dumps({"posts": posts}))


class Receiver:
    """An agent's live socket: what it receives as (type, text, from), in order."""

    def __init__(self, token, base_url):
        from relay_sdk import WsClient

        self.got = []
        self.opened = 0
        self.socket = WsClient(token=token, base_url=base_url)
        self.socket.on("*", self._note)
        self.task = asyncio.create_task(self.socket.connect())

    def _note(self, event):
        if event.get("type") == "open":
            self.opened += 1
        message = event.get("message")
        if isinstance(message, dict) and isinstance(message.get("text"), str):
            self.got.append((event["type"], message["text"], message.get("agent_name")))

    def texts(self):
        return [text for _, text, _ in self.got]

    async def close(self):
        self.socket.disconnect()
        await asyncio.wait([self.task], timeout=10)
