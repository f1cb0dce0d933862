import assert from 'node:assert/strict';
import { once } from 'node:events';
import type { AddressInfo } from 'node:net';
import test from 'node:test';

import { WebSocketServer, type WebSocket } from 'ws';

import { Runner, type Frame } from '../src/index.js';

/** Answers a request as a broker does. */
function answer(socket: WebSocket, frame: Frame): void {
  socket.send(JSON.stringify({ v: 2, type: 'ok', request_id: frame.request_id, payload: { result: {} } }));
}

async function nextFrame(socket: WebSocket): Promise<Frame> {
  const [data] = (await once(socket, 'message')) as [Buffer];
  return JSON.parse(String(data)) as Frame;
}

test('a runner that is stopped while it reconnects does not stay', { timeout: 20_000 }, async () => {
  const server = new WebSocketServer({ port: 0 });
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const manifest = { name: 'stopped', capabilities: [] };
  const runner = new Runner({ manifest, handlers: {}, connection: { url, apiKey: 'br_test' } });

  const connected = once(server, 'connection') as Promise<[WebSocket]>;
  const started = runner.start();
  const [first] = await connected;
  first.on('message', (data) => answer(first, JSON.parse(String(data)) as Frame));
  await started;

  const again = once(server, 'connection') as Promise<[WebSocket]>;
  first.terminate();
  const [second] = await again;
  const hello = await nextFrame(second);
  assert.equal(hello.type, 'hello');
  await runner.stop();
  assert.equal(await runner.ended, 'stopped');
  const types: string[] = [];
  second.on('message', (data) => {
    const frame = JSON.parse(String(data)) as Frame;
    types.push(frame.type);
    answer(second, frame);
  });
  const closed = once(second, 'close');
  answer(second, hello);
  await closed;
  assert.deepEqual(types, ['register_node', 'register_handlers', 'deregister_node']);
  server.close();
});
