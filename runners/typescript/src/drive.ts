/** Control of one agent's terminal. */

import type { Connection } from './connection.js';
import { RunnerError } from './frames.js';

type DeliveryMode = 'auto_inject' | 'manual_flush';

/** Message that waits for an agent. */
export interface PendingMessage {
  from: string;
  body: string;
  event_id: string;
  delivery_id: string;
}

/** An agent that is driven: its messages wait until they are flushed, and keys are typed for it. */
export class Drive {
  private constructor(
    private readonly connection: Connection,
    private readonly name: string,
    private readonly modeBefore: DeliveryMode,
  ) {}

  /** Begins to drive an agent: its messages are held. */
  static async begin(connection: Connection, name: string): Promise<Drive> {
    const mode = `/api/spawned/${encodeURIComponent(name)}/delivery-mode`;
    const before = (await call(connection, 'GET', mode)) as { mode: DeliveryMode };
    await call(connection, 'PUT', mode, { mode: 'manual_flush' });
    return new Drive(connection, name, before.mode);
  }

  /** Types keys, as they are. Resolves when the terminal has taken them. */
  async type(keys: string): Promise<void> {
    await call(this.connection, 'POST', `/api/input/${this.path}`, { data: keys });
  }

  async screen(): Promise<string> {
    const shown = (await call(this.connection, 'GET', `/api/spawned/${this.path}/snapshot`)) as { screen: string };
    return shown.screen;
  }

  async pending(): Promise<PendingMessage[]> {
    const list = (await call(this.connection, 'GET', `/api/spawned/${this.path}/pending`)) as {
      pending: PendingMessage[];
    };
    return list.pending;
  }

  /** Lets the messages through that wait now. Resolves with their number. */
  async flush(): Promise<number> {
    const flushed = (await call(this.connection, 'POST', `/api/spawned/${this.path}/flush`)) as { flushed: number };
    return flushed.flushed;
  }

  /** Ends the control: the mode is as before. */
  async end(): Promise<void> {
    await call(this.connection, 'PUT', `/api/spawned/${this.path}/delivery-mode`, { mode: this.modeBefore });
  }

  private get path(): string {
    return encodeURIComponent(this.name);
  }
}

async function call(connection: Connection, method: string, path: string, body?: object): Promise<unknown> {
  const response = await fetch(connection.url + path, {
    method,
    headers: { 'x-api-key': connection.apiKey, ...(body ? { 'content-type': 'application/json' } : {}) },
    ...(body ? { body: JSON.stringify(body) } : {}),
  });
  const answer = (await response.json()) as { code?: string; message?: string };
  if (response.ok) return answer;
  throw new RunnerError(answer.code ?? `http_${response.status}`, answer.message ?? '', response.status >= 500);
}
