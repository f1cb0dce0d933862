"""relaycast-sdk 1.0.0: a live client whose gateway is killed with kill -9 gets the rest through the other one.

Given: RELAY_FRONT (leads to the gateway that will be killed, later to the other), RELAY_OTHER (the other one),
RELAY_KEY (a workspace's key). With RELAY_STANDBY_LAGS, everything after the joining is missing on the standby of the
database. With RELAY_REFUSED, the client's upgrades are refused instead, until the test is asked to let it connect.
"""

import asyncio
import os

from relay_sdk import AsyncRelay

from harness import Receiver, ask, check, report, same, until

FRONT, OTHER, KEY = (os.environ[name] for name in ("RELAY_FRONT", "RELAY_OTHER", "RELAY_KEY"))


async def main():
    there = AsyncRelay(KEY, base_url=OTHER)
    lead = there.as_agent((await there.agents.register("lead")).token)
    registered = await there.agents.register("ada")
    ada = AsyncRelay(KEY, base_url=FRONT).as_agent(registered.token)
    await lead.channels.create("work")
    await ada.channels.join("work")
    receiver = Receiver(registered.token, FRONT)
    await until("the socket opens", lambda: receiver.opened == 1)

    posts = []

    async def post(text):
        posts.append((text, (await lead.send("work", text)).id))

    async def received(claim):
        await until(claim, lambda: len(set(receiver.texts())) >= len(posts), receiver.texts)

    async def all_acked():
        return await ada.deliveries() == []

    if "RELAY_STANDBY_LAGS" in os.environ:
        await ask("hold the standby back")
    for n in range(3):
        await post(f"before {n}")
    await received("what is posted before arrives live")
    await until("and is acked", all_acked)

    await ask("kill -9 the gateway")
    for n in range(10):
        await post(f"meanwhile {n}")
    if "RELAY_REFUSED" in os.environ:
        await ask("let the client connect")
    await received("what was posted meanwhile arrives through the other gateway")
    check("over a new connection", receiver.opened >= 2, receiver.opened)
    for n in range(3):
        await post(f"after {n}")
    await received("what is posted after that arrives live")
    got = receiver.texts()
    if "RELAY_STANDBY_LAGS" in os.environ:
        # Acks that were not replicated are lost with the primary. Their deliveries come again, with the same ids, and this
        # client passes them on.
        got = list(dict.fromkeys(got))
    same("everything in order, once", got, [text for text, _ in posts])
    await until("all of it is acked", all_acked)
    await report(posts)
    await receiver.close()
    print("all checks hold")


asyncio.run(main())
