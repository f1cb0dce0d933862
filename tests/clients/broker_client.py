"""Every public method of the published Python client of a broker against ours, which it starts itself.

Arguments: the broker, the fake agent, a working directory, a file for the agent's messages.
"""

import asyncio
import json
import sys

from agent_relay.client import AgentRelayClient, AgentRelayProtocolError
from broker_client_surface import surface, watch

BROKER, FAKE_AGENT, FOLDER, LOG = sys.argv[1:5]


async def until(what, check):
    for _ in range(600):
        value = check()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited for {what}")


def messages():
    try:
        with open(LOG, encoding="utf-8") as log:
            return log.read().splitlines()
    except FileNotFoundError:
        # The agent opens it when it starts.
        return []


async def main():
    errors = []
    Client = watch(AgentRelayClient)
    client = watch(
        await Client.spawn(
            binary_path=BROKER,
            binary_args=["--state-dir", f"{FOLDER}/state"],
            broker_name="python",
            cwd=FOLDER,
            startup_timeout_ms=60_000,
            on_stderr=errors.append,
        )
    )
    exited = asyncio.create_task(client.wait_for_exit())
    try:
        assert client.workspace_key
        session = await client.get_session()
        assert (session["protocol_version"], session["workspace_key"]) == (2, client.workspace_key), session
        with open(f"{FOLDER}/state/connection.json", encoding="utf-8") as file:
            connection = json.load(file)
        assert client.broker_pid == connection["pid"]
        assert (await client.health_check())["service"] == "agent-relay-listen"
        await client.preflight_agents([{"name": "x", "cli": "claude"}])
        spawned = await client.spawn_pty(
            name="a b#c", cli=FAKE_AGENT, args=["cooked", "--log", LOG], channels=["general"], task="first task"
        )
        assert spawned["pid"] > 0, spawned
        await until("the task", lambda: any(line.endswith("first task") for line in messages()))
        try:
            await client.spawn_pty(name="a b#c", cli="cat")
            raise AssertionError("a second agent of the name")
        except AgentRelayProtocolError as error:
            assert (error.code, error.retryable) == ("agent_already_exists", False), error
        assert [agent["name"] for agent in await client.list_agents()] == ["a b#c"]
        sent = await client.send_message(to="a b#c", text="through the engine", from_="pat")
        assert sent["event_id"], sent
        await until("the message", lambda: any(line.endswith("through the engine") for line in messages()))
        await until("a verdict", lambda: client.query_events(kind="delivery_verified"))
        events = []
        ignore = client.on_event(events.append)
        await client.send_input("a b#c", "typed\r")
        await until("keys", lambda: any(line.endswith(" typed") for line in messages()))
        await until("their echo", lambda: shown(events, "typed"))
        ignore()
        count = len(events)
        await client.send_input("a b#c", "unheard\r")
        await until("an echo", lambda: shown(client.query_events(kind="worker_stream", name="a b#c"), "unheard"))
        assert len(events) == count, events[count:]
        # A client that has not started the broker, and does not end it.
        guest = Client(base_url=connection["url"], api_key=connection["api_key"])
        assert (await guest.get_session())["workspace_key"] == client.workspace_key
        assert guest.broker_pid is None
        await guest.wait_for_exit()
        await guest.shutdown()
        await client.resize_pty("a b#c", 30, 100)
        await client.subscribe_channels("a b#c", ["python"])
        await client.unsubscribe_channels("a b#c", ["python"])
        await client.set_model("a b#c", "opus")
        assert (await client.get_status())["agent_count"] == 1
        assert (await client.get_metrics())["broker"]["active_agents"] == 1
        assert (await client.get_crash_insights())["health_score"] == 100
        assert (await client.renew_lease())["renewed"] is True
        clerk = await client.spawn_provider(name="clerk", provider="claude", transport="headless")
        assert clerk["runtime"] == "headless", clerk
        await client.send_message(to="clerk", text="to a run", from_="pat")
        await until("the run", lambda: [e for e in client.query_events(kind="delivery_verified") if e["name"] == "clerk"])
        await client.release("clerk")
        await client.release("a b#c", "done")
        await until("an empty list", lambda: no_agents(client))
    except BaseException:
        print("\n".join(errors[-30:]), file=sys.stderr)
        raise
    finally:
        await client.shutdown()
    await exited
    assert client.broker_pid is None
    count, unused = surface()
    assert count > 20 and not unused, (count, unused)
    print("done")


def shown(events, text):
    return text in "".join(event["chunk"] for event in events if event.get("kind") == "worker_stream")


async def no_agents(client):
    return not await client.list_agents()


asyncio.run(main())
