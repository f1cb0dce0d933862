// Parts of the published driver that are used without its client: the transport, the actions of a driver, and the echo of
// keys ahead of the terminal's.

import assert from 'node:assert/strict';

import {
  BrokerDriver,
  BrokerTransport,
  HarnessDriverProtocolError,
  PredictiveEchoEngine,
  registerDriverActions,
} from '@agent-relay/harness-driver';
import { ActionRegistry } from '@agent-relay/sdk/actions';

import { watch } from './driver_surface.mjs';

/** The one line of a terminal on which `cat` echoes keys. */
function lineModel() {
  const rows = [''];
  let col = 0;
  return {
    async write(data) {
      for (const character of data) {
        if (character === '\r') col = 0;
        else if (character === '\n') rows.push('');
        else rows[rows.length - 1] = rows.at(-1).slice(0, col) + character + rows.at(-1).slice(++col);
      }
    },
    cursor: () => ({ row: rows.length - 1, col }),
    rowText: (row) => rows[row].trimEnd(),
    isAltScreen: () => false,
    cols: () => 80,
    resize: () => {},
  };
}

/** Uses them with the broker of `driver`. */
export async function useParts(driver, { baseUrl, apiKey }, until) {
  const transport = watch('BrokerTransport', new BrokerTransport({ baseUrl, apiKey }));
  assert.deepEqual([transport.connected, transport.wsUrl], [false, `${baseUrl.replace('http', 'ws')}/ws`]);
  assert.match(transport.inputStreamUrl('a b#c'), /\/api\/input\/a%20b%23c\/stream$/);
  assert.equal((await transport.request('/api/session')).protocol_version, 2);
  const failed = await transport.request('/api/spawned/nobody/snapshot').catch((error) => error);
  assert.ok(failed instanceof HarnessDriverProtocolError);
  assert.deepEqual([failed.code, failed.status, failed.retryable], ['agent_not_found', 404, false]);
  const output = [];
  const forget = transport.onEvent((event) => {
    if (event.kind === 'worker_stream' && event.name === 'typist') output.push(event.chunk);
  });
  transport.connect(0);
  await until('the transport', () => transport.connected);

  // Actions of the SDK whose handlers are the driver's.
  const actions = new ActionRegistry();
  const registered = watch(
    'RegisteredDriverActions',
    registerDriverActions(actions, new BrokerDriver({ client: driver }), { actionPrefix: 'node' }),
  );
  const created = await actions.execute('node.create', { name: 'typist', cli: 'cat' });
  assert.deepEqual([created.agent.name, created.delivery.mode], ['typist', 'managed']);
  assert.match((await actions.execute('node.status', { name: 'typist' })).status, /^(busy|idle)$/);
  await until('its spawn', () => transport.getLastEvent('agent_spawned', 'typist'));

  // A person types faster than the broker answers: keys are shown at once and confirmed by the terminal's echo.
  const keys = transport.openInputStream('typist');
  await keys.waitUntilOpen();
  const shown = [];
  const echo = watch(
    'PredictiveEchoEngine',
    new PredictiveEchoEngine({
      model: lineModel(),
      write: (data) => shown.push(data),
      now: () => performance.now(),
      getInputSrtt: () => keys.srttMs ?? 1,
      config: { engageThresholdMs: 0 },
    }),
  );
  await echo.seed((await driver.snapshot('typist')).screen.trimEnd());
  echo.onUserInput('abc');
  assert.ok(echo.hasPredictions && shown.join('').includes('a'), 'keys are shown ahead');
  assert.equal((await keys.send('abc')).bytes_written, 3);
  const seen = async () => {
    while (output.length > 0) await echo.onServerOutput(output.shift());
    return !echo.hasPredictions;
  };
  await until('the echo', seen);
  assert.ok(echo.echoLatencyMs > 0, 'the echo has confirmed the keys');
  echo.onUserInput('x');
  assert.ok(echo.hasPredictions);
  echo.rollback();
  assert.equal(echo.hasPredictions, false);
  echo.onResize(100, 30);
  echo.reset();
  keys.close();

  assert.ok(transport.queryEvents({ kind: 'worker_stream', name: 'typist' }).length > 0);
  assert.deepEqual(await actions.execute('node.release', { name: 'typist' }), { name: 'typist', released: true });
  registered.unregister();
  assert.equal(actions.has('node.create'), false);
  forget();
  transport.disconnect();
  await until('the end of the transport', () => !transport.connected);
}
