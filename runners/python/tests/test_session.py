import asyncio
import json
import os
import unittest
from pathlib import Path

from relay_runner import RunnerError, Session

TRANSCRIPT = os.environ.get("RELAY_RUNNER_TRANSCRIPT", Path(__file__).parents[2] / "transcript.jsonl")


async def echo(input, context):
    return {**input, "agents": len(await context.session.list_agents())}


async def fail(_, context):
    return await context.session.spawn({"name": "", "runtime": "pty"}, invocation_id=context.invocation_id)


async def slow(_, context):
    await asyncio.Event().wait()


def session(handlers):
    sent = []

    async def send(text):
        sent.append(json.loads(text))

    return Session(send, handlers), sent


async def turns():
    for _ in range(20):
        await asyncio.sleep(0)


class SessionTest(unittest.IsolatedAsyncioTestCase):
    async def test_the_session_speaks_the_transcript(self):
        lines = [json.loads(line) for line in Path(TRANSCRIPT).read_text().splitlines()]
        registration = next(line["frame"] for line in lines if line.get("frame", {}).get("type") == "register_node")
        manifest = registration["payload"]["manifest"]
        under_test, sent = session({"echo": echo, "fail": fail, "slow": slow})
        tasks = [asyncio.create_task(under_test.register("$client_name", "$client_version", manifest))]
        for line in lines:
            if line.get("step") == "stop":
                tasks.append(asyncio.create_task(under_test.deregister()))
            if line.get("from") == "broker":
                under_test.on_text(json.dumps(line["frame"]))
            await turns()
            if line.get("from") == "runner":
                self.assertEqual(sent.pop(0), line["frame"])
        await asyncio.gather(*tasks)
        self.assertEqual(sent, [], "a cancelled call has no result")

    async def test_an_output_that_cannot_be_sent_fails_its_invocation_only(self):
        circular = []
        circular.append(circular)
        outputs = {
            "set": ({1}, "not JSON serializable"),
            "nan": (float("nan"), "not JSON compliant"),
            "circular": (circular, "Circular reference"),
            "large": ("x" * (768 << 10), "output_too_large"),
            "half": ("\ud83c", None),
            "accents": ("é" * (300 << 10), None),
        }

        def returns(output):
            async def handler(_, context):
                return output

            return handler

        async def raises(_, context):
            raise ValueError("\udc00" + "x" * 100_000)

        handlers = {name: returns(output) for name, (output, _) in outputs.items()}
        under_test, sent = session({**handlers, "raises": raises})
        for name, (_, problem) in {**outputs, "raises": (None, "?xxx")}.items():
            payload = {"invocation_id": name, "name": name, "input": {}}
            under_test.on_text(json.dumps({"v": 2, "type": "invoke_handler", "payload": payload}))
            await turns()
            result = sent.pop(0)["payload"]
            self.assertEqual(result["invocation_id"], name)
            if problem:
                self.assertIn(problem, result["error"], name)
                self.assertLess(len(result["error"]), 5000)
            else:
                self.assertIn("output", result, name)
        self.assertEqual(sent, [])

    async def test_a_request_that_is_too_large_is_not_sent(self):
        under_test, sent = session({})
        with self.assertRaises(RunnerError) as raised:
            await under_test.send_message("ada", "x" * (1 << 20))
        self.assertEqual((raised.exception.code, sent), ("frame_too_large", []))

    async def test_a_lost_connection_fails_requests_and_cancels_handlers(self):
        cancelled = asyncio.Event()

        async def wait(_, context):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        under_test, sent = session({"wait": wait})
        under_test.on_text('{"v":2,"type":"invoke_handler","payload":{"invocation_id":"1","name":"wait","input":{}}}')
        listing = asyncio.create_task(under_test.list_agents())
        await turns()
        under_test.on_close()
        with self.assertRaises(RunnerError) as raised:
            await listing
        self.assertEqual((raised.exception.code, raised.exception.retryable), ("disconnected", True))
        await asyncio.wait_for(cancelled.wait(), 5)
        with self.assertRaises(RunnerError):
            await under_test.list_agents()
        self.assertEqual([frame["type"] for frame in sent], ["list_agents"])

    async def test_text_that_is_no_frame_is_logged_and_unknown_kinds_are_passed_over(self):
        under_test, _ = session({})
        with self.assertLogs("relay_runner", "WARNING") as logs:
            for text in ("", "[]", '{"v":1,"type":"ok","payload":{}}', "null"):
                under_test.on_text(text)
        self.assertEqual(len(logs.records), 4)
        under_test.on_text('{"v":2,"type":"of_a_later_version","payload":{}}')
        for kind in ("invoke_handler", "cancel_handler"):
            under_test.on_text(json.dumps({"v": 2, "type": kind, "payload": {"name": 5}}))
        under_test.on_text('{"v":2,"type":"ok","request_id":"99","payload":{"result":1}}')
