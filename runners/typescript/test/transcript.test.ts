import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import path from 'node:path';
import test from 'node:test';

import type { Frame, Handler } from '../src/index.js';
import { Session } from '../src/index.js';

type Line = { from: 'runner' | 'broker'; frame: Frame } | { step: string };

const file = process.env['RELAY_RUNNER_TRANSCRIPT'] ?? path.resolve('../transcript.jsonl');
const lines = readFileSync(file, 'utf8')
  .trim()
  .split('\n')
  .map((line) => JSON.parse(line) as Line);
const registration = lines.find((line) => 'frame' in line && line.frame.type === 'register_node');
const manifest = (registration as { frame: Frame }).frame.payload['manifest'] as never;

const handlers = new Map<string, Handler>([
  ['echo', async (input, { session }) => ({ ...(input as object), agents: (await session.listAgents()).length })],
  ['fail', (_, { session, invocationId }) => session.spawn({ name: '', runtime: 'pty' }, { invocationId })],
  ['slow', (_, { signal }) => new Promise((resolve) => signal.addEventListener('abort', resolve))],
]);

test('the session speaks the transcript', async () => {
  const sent: Frame[] = [];
  const session = new Session({ send: (text) => sent.push(JSON.parse(text) as Frame) }, handlers);
  const registered = session.register({ name: '$client_name', version: '$client_version' }, manifest);
  let stopped: Promise<void> | undefined;
  for (const line of lines) {
    if ('step' in line) {
      if (line.step === 'stop') stopped = session.deregister();
      continue;
    }
    if (line.from === 'broker') {
      session.onText(JSON.stringify(line.frame));
      continue;
    }
    // Answers are taken in microtasks.
    for (let turn = 0; turn < 20 && sent.length === 0; turn++) await new Promise(setImmediate);
    assert.deepEqual(sent.shift(), line.frame);
  }
  await registered;
  await stopped;
  assert.deepEqual(sent, [], 'a cancelled call has no result');
});

test('a lost connection fails requests and aborts handlers', async () => {
  const sent: string[] = [];
  let aborted = false;
  const waits: Handler = (_, { signal }) => signal.addEventListener('abort', () => (aborted = true));
  const session = new Session({ send: (text) => sent.push(text) }, new Map([['wait', (input, context) => {
    waits(input, context);
    return new Promise(() => {});
  }]]));
  session.onText('{"v":2,"type":"invoke_handler","payload":{"invocation_id":"1","name":"wait","input":{}}}');
  const list = session.listAgents();
  session.onClose();
  await assert.rejects(list, { code: 'disconnected', retryable: true });
  await assert.rejects(session.listAgents(), { code: 'disconnected' });
  assert.ok(aborted);
});

test('what is no frame is reported, and unknown kinds are passed over', () => {
  const problems: unknown[] = [];
  const session = new Session({ send: () => {} }, new Map(), (error) => problems.push(error));
  for (const text of ['', '[]', '{"v":1,"type":"ok","payload":{}}', 'null']) session.onText(text);
  assert.equal(problems.length, 4);
  session.onText('{"v":2,"type":"of_a_later_version","payload":{}}');
  session.onText('{"v":2,"type":"ok","request_id":"99","payload":{"result":1}}');
  assert.equal(problems.length, 4);
});
