// What the scripts share: checks that are printed, requests to the test that runs them, waits.

import { createInterface } from 'node:readline';
import { WebSocket } from 'ws';

// The SDK expects a global WebSocket, which older supported versions of Node do not have.
globalThis.WebSocket ??= WebSocket;

const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Prints the claim, or ends the script when it does not hold. */
export function check(claim, holds, shown) {
  if (holds) return console.log(`ok      ${claim}`);
  console.log(`FAILED  ${claim}${shown === undefined ? '' : `: ${JSON.stringify(shown)}`}`);
  process.exit(1);
}

/** Checks that two values are the same as JSON. */
export function same(claim, actual, expected) {
  const equal = JSON.stringify(actual) === JSON.stringify(expected);
  check(claim, equal, equal ? undefined : { actual, expected });
}

/** Checks that a call is refused with this code, and returns the error. */
export async function refused(claim, code, call) {
  try {
    const answer = await call();
    check(claim, false, { answer });
  } catch (error) {
    check(`${claim} (${code})`, error.code === code, { code: error.code, message: error.message });
    return error;
  }
}

/** Waits until `condition` holds; `shown` tells what there was instead. */
export async function until(claim, condition, shown = () => undefined, seconds = 40) {
  const end = Date.now() + seconds * 1000;
  while (!(await condition())) {
    if (Date.now() > end) check(claim, false, shown());
    await new Promise((wake) => setTimeout(wake, 25));
  }
  check(claim, true);
}

/** Asks the test that runs this script to do something, and waits until it is done. */
export async function ask(request) {
  console.log(`@${request}`);
  const { value } = await answers.next();
  check(`the test did "${request}"`, value === 'done', value);
}

/** Gives the test the posts, as [text, id], for the rules of all histories, and what it needs to read the state at the end. */
export const report = (posts, rest) => ask(JSON.stringify({ posts, ...rest }));

/**
 * Connects an agent's client and waits until its socket is open. `events` is what it receives live, as
 * [type, text, sender] in order, without events that have no text; `opened` counts its connections.
 */
export async function live(client) {
  const seen = { events: [], opened: 0 };
  client.connect();
  client.on.connected(() => {
    seen.opened += 1;
  });
  client.on.any((event) => {
    const text = event.message?.text ?? event.text;
    if (typeof text === 'string') seen.events.push([event.type, text, event.message?.agentName]);
  });
  await until('the socket opens', () => seen.opened > 0);
  return seen;
}

/** Ends the script although sockets may still be open. */
export function finish() {
  console.log('all checks hold');
  process.exit(0);
}

process.on('unhandledRejection', (error) => {
  console.log(`FAILED  ${error?.stack ?? error} ${error?.code ?? ''}`);
  process.exit(1);
});
