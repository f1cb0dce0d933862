import assert from 'node:assert/strict';
import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import path from 'node:path';
import test from 'node:test';

import { readConnection } from '../src/index.js';

test('a connection file names URL and key', async () => {
  const file = path.join(await mkdtemp(path.join(tmpdir(), 'runner-')), 'connection.json');
  await assert.rejects(readConnection(file), /no broker runs/);
  await writeFile(file, '{"url": 5}');
  await assert.rejects(readConnection(file), /not a connection file/);
  await writeFile(file, '{"url":"http://127.0.0.1:1","port":1,"api_key":"br_1","pid":1}');
  assert.deepEqual(await readConnection(file), { url: 'http://127.0.0.1:1', apiKey: 'br_1' });
});
