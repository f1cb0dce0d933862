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

test('an output that cannot be sent fails its invocation only', async () => {
  const circular: unknown[] = [];
  circular.push(circular);
  const cases: [string, unknown, RegExp | undefined][] = [
    ['bigint', 1n, /BigInt/],
    ['function', () => {}, /function is not JSON/],
    ['symbol', Symbol('x'), /symbol is not JSON/],
    ['circular', circular, /circular/],
    ['large', 'x'.repeat(768 * 1024), /output_too_large/],
    ['undefined', undefined, undefined],
    ['half', { text: '\\ud83c \ud83c \ud83c\udf89' }, undefined],
    ['accents', 'é'.repeat(300 * 1024), undefined],
  ];
  const sent: string[] = [];
  const raises: Handler = () => {
    throw Object.create(null);
  };
  const named = cases.map(([name, output]): [string, Handler] => [name, () => output]);
  const session = new Session({ send: (text) => sent.push(text) }, new Map([...named, ['raises', raises]]));
  for (const [name, , problem] of [...cases, ['raises', undefined, /no text/] as const]) {
    const payload = { invocation_id: name, name, input: {} };
    session.onText(JSON.stringify({ v: 2, type: 'invoke_handler', payload }));
    for (let turn = 0; turn < 20 && sent.length === 0; turn++) await new Promise(setImmediate);
    const text = sent.shift() ?? '';
    const result = (JSON.parse(text) as Frame).payload;
    assert.equal(result['invocation_id'], name);
    if (problem) assert.match(String(result['error']), problem);
    else assert.ok('output' in result && !('error' in result), text.slice(0, 200));
    if (name === 'half') assert.deepEqual(result['output'], { text: '\\ud83c \ufffd \ud83c\udf89' });
  }
  assert.deepEqual(sent, []);
});

test('a request that is too large is not sent', async () => {
  const sent: string[] = [];
  const session = new Session({ send: (text) => sent.push(text) }, new Map());
  await assert.rejects(session.send({ to: 'ada', text: 'x'.repeat(1024 * 1024) }), { code: 'frame_too_large' });
  assert.deepEqual(sent, []);
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
