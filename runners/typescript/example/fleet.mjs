/**
 * Hosts a node that is defined with `@agent-relay/fleet`: `node fleet.mjs` in the broker's directory, or with
 * the path of a connection file as its argument. Ends on SIGTERM or Ctrl-C.
 */

import { action, defineNode, spawn } from '@agent-relay/fleet';

import { fleetRunner } from 'relay-runner';

const definition = defineNode({
  name: 'example',
  capabilities: {
    shout: action({}, (input) => ({ text: String(input.text).toUpperCase() })),
    'spawn:cat': spawn({ runtime: 'pty', command: 'cat' }),
  },
});

const file = process.argv[2];
const runner = fleetRunner(definition, { ...(file ? { connection: file } : {}), onProblem: console.error });
await runner.start();
console.log('registered');
for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => void runner.stop());
console.log(await runner.ended);
