/**
 * Hosts a node that is defined with `@agent-relay/fleet`, with an action that drives an agent: `node fleet.mjs` in the
 * broker's directory, or with the path of a connection file as its argument. Ends on SIGTERM or Ctrl-C.
 */

import { setTimeout } from 'node:timers/promises';

import { action, defineNode, spawn } from '@agent-relay/fleet';

import { fleetRunner } from 'relay-runner';

async function until(what, check) {
  for (let turn = 0; turn < 600; turn++) {
    if (await check()) return;
    await setTimeout(50);
  }
  throw new Error(`waited for ${what}`);
}

/** Starts an agent and types for it while a message waits, then lets the message through. */
async function dictate({ name, keys, text }, { relay }) {
  await runner.spawn({ name, runtime: 'pty', cli: 'cat' });
  const drive = await runner.drive(name);
  await runner.send({ to: name, text });
  await until('the message', async () => (await drive.pending()).some(({ body }) => body === text));
  await drive.type(`${keys}\r`);
  await until('the keys', async () => (await drive.screen()).includes(keys));
  const before = await drive.screen();
  const flushed = await drive.flush();
  await until('the message on the screen', async () => (await drive.screen()).includes(text));
  await drive.end();
  await relay.sendMessage({ to: '#general', text: `${name} has ${text}` });
  return { before, after: await drive.screen(), flushed };
}

const definition = defineNode({
  name: 'example',
  capabilities: {
    shout: action({}, (input) => ({ text: String(input.text).toUpperCase() })),
    dictate: action({}, dictate),
    'spawn:cat': spawn({ runtime: 'pty', command: 'cat' }),
  },
});

const file = process.argv[2];
const runner = fleetRunner(definition, { ...(file ? { connection: file } : {}), onProblem: console.error });
await runner.start();
console.log('registered');
for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => void runner.stop());
console.log(await runner.ended);
