/** Address and key of a broker. */

import { readFile } from 'node:fs/promises';
import path from 'node:path';

export interface Connection {
  url: string;
  apiKey: string;
}

/** Place of the file that a broker writes: `AGENT_RELAY_STATE_DIR`, else below the directory. */
export function connectionFile(directory: string = process.cwd()): string {
  const stateDir = process.env['AGENT_RELAY_STATE_DIR'] || path.join(directory, '.agentworkforce', 'relay');
  return path.join(stateDir, 'connection.json');
}

/** Reads a broker's connection file. */
export async function readConnection(file: string = connectionFile()): Promise<Connection> {
  let text: string;
  try {
    text = await readFile(file, 'utf8');
  } catch (error) {
    throw new Error(`no broker runs: ${file} cannot be read`, { cause: error });
  }
  const found = JSON.parse(text) as { url?: unknown; api_key?: unknown };
  if (typeof found.url !== 'string' || typeof found.api_key !== 'string') {
    throw new Error(`${file} is not a connection file: url and api_key are needed`);
  }
  return { url: found.url, apiKey: found.api_key };
}
