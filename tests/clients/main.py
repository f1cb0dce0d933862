"""relaycast-sdk 1.0.0: the main flow, ada at one gateway and bob at the other.

Given: RELAY_A and RELAY_B (the gateways), RELAY_KEY (a workspace's key; this client cannot create one).
"""

import asyncio
import os

from relay_sdk import AsyncRelay, Relay

from harness import Receiver, check, refused, same, until

A, B, KEY = (os.environ[name] for name in ("RELAY_A", "RELAY_B", "RELAY_KEY"))


async def main():
    at_a, at_b = AsyncRelay(KEY, base_url=A), AsyncRelay(KEY, base_url=B)
    info = await at_b.workspace.info()
    check("the key finds its workspace", info.name.startswith("sdk-python"), info)

    # Agents.
    registered = {}
    for name in ("ada", "bob", "cyd"):
        registered[name] = await at_a.agents.register(name, type="agent", persona=f"{name} of the test")
        check(f"{name} is registered", registered[name].token.startswith("at_live_"), registered[name])
    await refused("a name is taken once", 409, "agent_already_exists", at_b.agents.register("ada"))
    rotated = await at_b.register_or_rotate("cyd")
    same("register_or_rotate keeps the agent", rotated.id, registered["cyd"].id)
    check("register_or_rotate gives a new token", rotated.token != registered["cyd"].token)
    await refused("the old token is dead", 401, "agent_token_invalid", at_a.as_agent(registered["cyd"].token).me())
    same("agents are listed", sorted(a.name for a in await at_a.agents.list()), ["ada", "bob", "cyd"])
    same("an agent is found by name", (await at_b.agents.get("ada")).id, registered["ada"].id)
    await refused("nobody is found by a wrong name", 404, "agent_not_found", at_a.agents.get("nobody"))

    ada = at_a.as_agent(registered["ada"].token)
    bob = at_b.as_agent(registered["bob"].token)
    cyd = at_a.as_agent(rotated.token)
    same("an agent knows itself", (await ada.me()).name, "ada")

    # Channels.
    channel = await ada.channels.create("plans", topic="what to do")
    same("a channel is created", (channel.name, channel.topic), ("plans", "what to do"))
    await bob.channels.join("plans")
    check("channels are listed", any(c.name == "plans" for c in await bob.channels.list()))
    await ada.channels.invite("plans", "cyd")
    members = sorted(m.agent_name for m in await ada.channels.members("plans"))
    same("members are listed", members, ["ada", "bob", "cyd"])
    same("a topic is set", (await ada.channels.set_topic("plans", "today")).topic, "today")
    await refused("a channel is created once", 409, "channel_already_exists", bob.channels.create("plans"))

    # Live, from one gateway to the other.
    receiver = Receiver(registered["bob"].token, B)
    await until("the socket opens", lambda: receiver.opened == 1)
    posted = await ada.send("#plans", "first")
    same("a post is answered", (posted.text, posted.agent_name), ("first", "ada"))
    await ada.send("plans", "second @bob", mode="steer")
    reply = await ada.reply(posted.id, "in a thread")
    same("a reply is answered", reply.text, "in a thread")
    dm = await ada.dm("bob", "between us")
    same("a direct message is answered", dm["message"]["text"], "between us")
    group = await ada.dms.create_group(["bob", "cyd"], "hello both", name="three")
    group_id = group.get("conversation_id") or group["id"]
    await ada.dms.send_message(group_id, "among three")
    await until("bob receives all six live", lambda: len(receiver.got) >= 6, lambda: receiver.got)
    expected = [
        ("message.created", "first", "ada"),
        ("message.created", "second @bob", "ada"),
        ("thread.reply", "in a thread", "ada"),
        ("dm.received", "between us", "ada"),
        ("group_dm.received", "hello both", "ada"),
        ("group_dm.received", "among three", "ada"),
    ]
    same("in order, once each", receiver.got, expected)
    await cyd.send("plans", "from another")
    await until("and what another agent posts", lambda: len(receiver.got) == 7, lambda: receiver.got)

    # Reading back.
    texts = sorted(m.text for m in await bob.messages("plans"))
    same("messages are listed", texts, ["first", "from another", "second @bob"])
    same("a message is read by id", (await bob.message(posted.id)).text, "first")
    thread = await bob.thread(posted.id)
    same("a thread is read", (thread.parent.text, [m.text for m in thread.replies]), ("first", ["in a thread"]))
    messages = await bob.dms.messages(dm["conversation_id"])
    same("a conversation is read", [m.text for m in messages], ["between us"])
    receipt = await bob.mark_read(posted.id)
    same("a message is marked read", receipt["message_id"], posted.id)

    async def settled():
        return await bob.deliveries() == []

    await until("all of bob's deliveries are acked", settled)

    await receiver.close()
    await bob.disconnect()

    async def offline():
        return (await at_a.agents.get("bob")).status == "offline"

    await until("a client that disconnects is offline", offline)

    # The blocking client is the same code a second time; a short round suffices.
    def blocking():
        with Relay(KEY, base_url=B) as relay:
            dora = relay.as_agent(relay.register_or_rotate("dora").token)
            dora.channels.join("plans")
            sent = dora.send("plans", "blocking")
            return sent.id == dora.messages("plans", limit=1)[0].id

    check("the blocking client posts and lists", await asyncio.to_thread(blocking))
    print("all checks hold")


asyncio.run(main())
