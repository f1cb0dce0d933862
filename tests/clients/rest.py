"""relaycast-sdk 1.0.0: everything it asks over REST, once with its async client and once with its blocking one.

Its models are strict: an answer that lacks a field or holds another type fails here. Given: RELAY_A and RELAY_B (the
gateways), RELAY_KEY (a workspace's key).
"""

import asyncio
import inspect
import os
from datetime import datetime, timedelta, timezone

import httpx
from relay_sdk import AsyncRelay, Relay
from relay_sdk.models import (
    BindAgentToNodeRequest,
    CreateNodeRequest,
    CreateObserverTokenRequest,
    DeferDeliveryRequest,
    FailDeliveryRequest,
    ObserverTokenFilters,
    UpdateObserverTokenRequest,
)

from harness import check, refused, same

A, B, KEY = (os.environ[name] for name in ("RELAY_A", "RELAY_B", "RELAY_KEY"))


async def call(outcome):
    """The answer of a call of either client."""
    return await outcome if inspect.isawaitable(outcome) else outcome


async def later(make):
    """A call that is made when it is awaited."""
    return await call(make())


async def unread(ada, bob, plans):
    mine = await call(bob.post(plans, "from bob"))
    first = await call(ada.send(plans, "unread one"))
    second = await call(ada.send(plans, "unread two, @bob"))
    dm = await call(ada.dm("bob", "a letter"))
    await call(ada.react(mine.id, "eyes"))
    inbox = await call(bob.inbox(limit=5))
    counts = {channel.channel_name: channel.unread_count for channel in inbox.unread_channels}
    same("unread messages are counted", counts.get(plans), 2)
    same("mentions are shown", [(m.id, m.agent_name) for m in inbox.mentions if m.channel_name == plans], [(second.id, "ada")])
    letters = [(one.from_, one.unread_count, one.last_message.text) for one in inbox.unread_dms]
    same("letters too", letters, [("ada", 1, "a letter")])
    reactions = [(one.message_id, one.emoji) for one in inbox.recent_reactions if one.channel_name == plans]
    same("and reactions", reactions, [(mine.id, "eyes")])
    await call(bob.mark_read(first.id))
    same("readers are told", [reader.agent_name for reader in await call(ada.readers(first.id))], ["bob"])
    status = {one.agent_name: one.last_read_id for one in await call(ada.read_status("#" + plans))}
    same("and how far they are", status["bob"], first.id)
    await call(bob.mark_read(second.id))
    await call(bob.mark_read(dm["message"]["id"]))
    inbox = await call(bob.inbox())
    check("until all is read", not inbox.unread_dms and plans not in [one.channel_name for one in inbox.unread_channels], inbox)
    conversations = [one for one in await call(bob.dms.conversations()) if one.id == dm["conversation_id"]]
    same("a conversation has names", [(sorted(one.participants), one.last_message) for one in conversations], [(["ada", "bob"], "a letter")])
    groups = [(group.emoji, group.count, group.agents) for group in await call(bob.reactions(mine.id))]
    same("reactions are grouped", groups, [("eyes", 1, ["ada"])])
    await call(ada.unreact(mine.id, "eyes"))
    same("and taken back", await call(bob.reactions(mine.id)), [])
    hits = await call(bob.search("unread", channel=plans, from_="ada", limit=1))
    same("words are found", [(hit["channel_name"], hit["agent_name"]) for hit in hits], [(plans, "ada")])
    same("letters by those in them", [hit["text"] for hit in await call(bob.search("letter", limit=1))], ["a letter"])


async def deliveries(ada, bob):
    for item in await call(bob.deliveries(limit=200)):
        await call(bob.ack_delivery(item.id))
    for text in ("to ack", "to fail", "to defer"):
        await call(ada.dm("bob", text))
    waiting = await call(bob.deliveries(status="queued"))
    same("a mailbox is listed", [item.message.text for item in waiting], ["to ack", "to fail", "to defer"])
    same("one is acknowledged", (await call(bob.ack_delivery(waiting[0].id))).status, "acked")
    failed = await call(bob.fail_delivery(waiting[1].id, FailDeliveryRequest(error="no use", retryable=False)))
    same("one fails", (failed.status, failed.error), ("failed", "no use"))
    in_an_hour = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    deferred = await call(bob.defer_delivery(waiting[2].id, DeferDeliveryRequest(available_at=in_an_hour)))
    same("one is put off", deferred.status, "queued")
    await call(bob.ack_delivery(waiting[2].id))
    same("nothing is left", await call(bob.deliveries()), [])


async def files(ada, bob, plans):
    content = b"what the file holds\n"
    upload = await call(ada.files.upload("plan.txt", "text/plain", len(content)))
    async with httpx.AsyncClient(trust_env=False) as http:
        put = await http.put(upload.upload_url, content=content, headers={"Content-Type": "text/plain"})
        check("the bytes are taken", put.is_success, put.status_code)
        file = await call(ada.files.complete(upload.file_id))
        same("a file is complete", (file.filename, file.size, file.uploaded_by), ("plan.txt", len(content), "ada"))
        info = await call(bob.files.get(file.file_id))
        same("others get the same bytes", (await http.get(info.url)).content, content)
    posted = await call(ada.send(plans, "see the file", attachments=[file.file_id]))
    same("it is attached", [attachment.filename for attachment in posted.attachments], ["plan.txt"])
    listed = await call(bob.files.list(uploaded_by=(await call(ada.me())).id))
    check("files are listed", file.file_id in [one.file_id for one in listed])
    await call(ada.files.delete(file.file_id))
    check("until deleted", file.file_id not in [one.file_id for one in await call(bob.files.list())])


async def observer_tokens(relay, there, make, plans):
    request = CreateObserverTokenRequest(
        name=f"board-{plans}", scopes=["stream:read", "agents:read"], filters=ObserverTokenFilters(channel_names=[plans])
    )
    made = await call(relay.observer_tokens.create(request))
    check("an observer token is made", made.token.startswith("ot_live_"), made)
    observer = make(made.token)
    check("it sees what it may", "ada" in [agent.name for agent in await call(observer.agents.list())])
    await refused("and nothing else", 403, "insufficient_scope", later(lambda: observer.nodes.list()))
    changed = await call(there.observer_tokens.update(made.id, UpdateObserverTokenRequest(description="on the wall")))
    same("it is changed", changed.description, "on the wall")
    same("and read", (await call(relay.observer_tokens.get(made.id))).description, "on the wall")
    check("and listed", made.id in [one.id for one in await call(there.observer_tokens.list())])
    rotated = await call(there.observer_tokens.rotate(made.id))
    check("it is rotated", rotated.token.startswith("ot_live_") and rotated.token != made.token)
    await call(relay.observer_tokens.revoke(made.id))
    statuses = [one.status for one in await call(relay.observer_tokens.list()) if one.id == made.id]
    check("and revoked", statuses in ([], ["revoked"]), statuses)


async def the_rest(relay, there, agents, mark):
    ada, bob, _ = agents
    info = await call(there.workspace.update(system_prompt=f"be brief, {mark}"))
    same("a workspace is updated", (info.system_prompt, info.api_key_hash), (f"be brief, {mark}", ""))
    name = f"short-{mark}"
    await call(ada.channels.create(name, topic="first"))
    same("a channel is updated", (await call(ada.channels.update(name, topic="second"))).topic, "second")
    await call(bob.channels.join(name))
    await call(bob.channels.mute(name))
    before = len(await call(bob.deliveries(limit=200)))
    await call(ada.send(name, "not for the muted"))
    same("who mutes gets nothing", len(await call(bob.deliveries(limit=200))), before)
    await call(bob.channels.unmute(name))
    await call(ada.send(name, "for all again"))
    same("until it listens again", len(await call(bob.deliveries(limit=200))), before + 1)
    await call(bob.channels.leave(name))
    same("who leaves is gone", [member.agent_name for member in await call(ada.channels.members(name))], ["ada"])
    await call(ada.channels.archive(name))
    check("what is archived is not listed", name not in [one.name for one in await call(bob.channels.list())])
    check("unless asked for", name in [one.name for one in await call(bob.channels.list(include_archived=True))])
    same("a channel is read", (await call(ada.channels.get("general")))["name"], "general")

    for come, go in ((bob.mark_online, bob.mark_offline), (bob.heartbeat, bob.disconnect)):
        await call(come())
        same("an agent comes", (await call(relay.agents.get("bob"))).status, "online")
        await call(go())
        same("and goes", (await call(there.agents.get("bob"))).status, "offline")
    check("agents are listed by status", "bob" in [agent.name for agent in await call(relay.agents.list(status="offline"))])

    node = await call(relay.nodes.create(CreateNodeRequest(name=f"mill-{mark}", capabilities=["grind"], max_agents=2)))
    check("a node is made", node.token.startswith("nt_live_"))
    await call(there.nodes.bind_agent(node.name, BindAgentToNodeRequest(agent_name="cyd")))
    same("agents are bound to it", [one.agent_name for one in await call(relay.nodes.list_agents(node.name))], ["cyd"])
    await call(relay.nodes.unbind_agent(node.name, "cyd"))
    same("and not any more", await call(there.nodes.list_agents(node.name)), [])
    same("it is read", (await call(there.nodes.get(node.name))).max_agents, 2)
    same("and listed", [one.name for one in await call(relay.nodes.list(name=node.name))], [node.name])


async def everything(relay, there, make, mark):
    """`relay` and `there` are the workspace's clients at the two gateways; `make` makes one of another key."""
    tokens = {}
    for name in ("ada", "bob", "cyd"):
        tokens[name] = (await call(relay.register_or_rotate(name))).token
    ada, bob, cyd = relay.as_agent(tokens["ada"]), there.as_agent(tokens["bob"]), there.as_agent(tokens["cyd"])
    plans = f"plans-{mark}"
    await call(ada.channels.create(plans))
    await call(bob.channels.join(plans))
    await unread(ada, bob, plans)
    await deliveries(ada, bob)
    await files(ada, bob, plans)
    await observer_tokens(relay, there, make, plans)
    await the_rest(relay, there, (ada, bob, cyd), mark)
    print(f"all checks hold for the {mark} client")


async def main():
    await everything(AsyncRelay(KEY, base_url=A), AsyncRelay(KEY, base_url=B), lambda key: AsyncRelay(key, base_url=B), "async")
    await everything(Relay(KEY, base_url=A), Relay(KEY, base_url=B), lambda key: Relay(key, base_url=B), "blocking")


asyncio.run(main())
