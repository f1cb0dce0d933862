"""relaycast-sdk 1.0.0: a node provider serves what an agent asks for, through two gateways.

Given: RELAY_A and RELAY_B (the gateways), RELAY_KEY (a workspace's key).
"""

import asyncio
import os

from relay_sdk import AsyncRelay
from relay_sdk.models import CreateNodeRequest
from relay_sdk.node import NodeProvider

from harness import check, same, until

A, B, KEY = (os.environ[name] for name in ("RELAY_A", "RELAY_B", "RELAY_KEY"))


def field(answer, name):
    """Answers of these calls are plain objects in this version."""
    return answer[name] if isinstance(answer, dict) else getattr(answer, name)


async def main():
    relay = AsyncRelay(KEY, base_url=A)
    agent = await relay.agents.register("ada")
    ada = relay.as_agent(agent.token)
    node = await relay.nodes.create(CreateNodeRequest(name="press"))
    provider = NodeProvider(
        base_url=B, node_token=node.token, node_id=node.id, node_name="press", provider={"name": "presser"}
    )

    async def squeeze(given, context):
        return {"juice": given["fruit"]}

    async def burst(given, context):
        raise ValueError("it burst")

    provider.capability("squeeze", squeeze, global_=True)
    provider.capability("burst", burst, global_=True)
    serving = asyncio.create_task(provider.serve())
    await provider.wait_registered()

    async def outcome(name, given):
        asked = await ada.actions.invoke(name, given)
        last = {}

        async def ended():
            last["row"] = await ada.actions.get_invocation(name, field(asked, "invocation_id"))
            return field(last["row"], "completed_at") is not None

        await until(f"{name} has an outcome", ended, lambda: last)
        return [field(last["row"], key) for key in ("status", "output", "error")]

    same("a provider does what an agent asks for", await outcome("squeeze", {"fruit": "apple"}), ["completed", {"juice": "apple"}, None])
    status, output, error = await outcome("burst", None)
    check("or tells why not", status == "failed" and output is None and "it burst" in error, (status, output, error))
    await provider.stop()
    await serving


asyncio.run(main())
