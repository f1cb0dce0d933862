/** One connection to the broker: requests and their answers, calls of handlers and their results. */

import { decode, RunnerError, VERSION, type AgentSpec, type Manifest, type MessageInput } from './frames.js';

/** Largest output of a handler, and largest frame; the broker closes the socket of a runner that sends a larger one. */
const MAX_OUTPUT_BYTES = 768 * 1024;
const MAX_FRAME_BYTES = 1024 * 1024;
/** Longest error of a handler, in characters. */
const MAX_ERROR = 4096;

/** Socket of a session. */
export interface Socket {
  send(text: string): void;
}

/** Circumstances of one call of a handler. */
export interface HandlerContext {
  invocationId: string;
  /** Aborted when the result is not waited for any more. */
  signal: AbortSignal;
  session: Session;
}

export type Handler = (input: unknown, context: HandlerContext) => unknown;

interface Waiting {
  resolve(result: unknown): void;
  reject(error: RunnerError): void;
}

export class Session {
  private lastRequest = 0;
  private readonly waiting = new Map<string, Waiting>();
  private readonly calls = new Map<string, AbortController>();
  private isOpen = true;

  constructor(
    private readonly socket: Socket,
    private readonly handlers: ReadonlyMap<string, Handler>,
    private readonly onProblem: (error: unknown) => void = () => {},
  ) {}

  /** Registers the manifest, then the handlers. */
  async register(client: { name: string; version: string }, manifest: Manifest): Promise<void> {
    await this.request('hello', { client_name: client.name, client_version: client.version });
    await this.request('register_node', { manifest });
    await this.request('register_handlers', { names: [...this.handlers.keys()] });
  }

  /** Withdraws manifest and handlers; the broker then closes the socket. */
  async deregister(): Promise<void> {
    await this.request('deregister_node', {});
  }

  /** Sends a request and resolves with its result. */
  request(type: string, payload: object): Promise<unknown> {
    if (!this.isOpen) return Promise.reject(disconnected());
    const id = String(++this.lastRequest);
    return new Promise((resolve, reject) => {
      const text = encode({ v: VERSION, type, request_id: id, payload });
      if (Buffer.byteLength(text) > MAX_FRAME_BYTES) {
        throw new RunnerError('frame_too_large', `the request ${type} is larger than 1 MiB`, false);
      }
      this.waiting.set(id, { resolve, reject });
      this.socket.send(text);
    });
  }

  /** Starts an agent. An invocation names the call that the agent is born under. */
  spawn(
    agent: AgentSpec,
    options: { task?: string; skipRelayPrompt?: boolean; invocationId?: string } = {},
  ): Promise<unknown> {
    return this.request('spawn_agent', {
      agent,
      ...(options.task === undefined ? {} : { initial_task: options.task }),
      ...(options.skipRelayPrompt === undefined ? {} : { skip_relay_prompt: options.skipRelayPrompt }),
      ...(options.invocationId === undefined ? {} : { invocation_id: options.invocationId }),
    });
  }

  send(message: MessageInput): Promise<unknown> {
    return this.request('send_message', message);
  }

  async listAgents(): Promise<Record<string, unknown>[]> {
    const list = (await this.request('list_agents', {})) as { agents: Record<string, unknown>[] };
    return list.agents;
  }

  /** Takes a text frame of the broker. */
  onText(text: string): void {
    const frame = decode(text);
    if (!frame) return this.onProblem(new Error(`not a frame: ${text.slice(0, 200)}`));
    const { type, payload } = frame;
    switch (type) {
      case 'ok':
        return this.take(frame.request_id)?.resolve(payload['result']);
      case 'error': {
        const error = new RunnerError(
          String(payload['code']),
          String(payload['message']),
          payload['retryable'] === true,
        );
        const waiting = this.take(frame.request_id);
        return waiting ? waiting.reject(error) : this.onProblem(error);
      }
      case 'invoke_handler':
        void this.call(String(payload['invocation_id']), String(payload['name']), payload['input']);
        return;
      case 'cancel_handler': {
        const id = String(payload['invocation_id']);
        this.calls.get(id)?.abort(new RunnerError('cancelled', String(payload['reason']), false));
        this.calls.delete(id);
        return;
      }
      default:
      // Kinds of later brokers.
    }
  }

  /** The socket has closed: nothing is answered or waited for any more. */
  onClose(): void {
    this.isOpen = false;
    for (const { reject } of this.waiting.values()) reject(disconnected());
    this.waiting.clear();
    for (const call of this.calls.values()) call.abort(disconnected());
    this.calls.clear();
  }

  private take(id: string | undefined): Waiting | undefined {
    if (id === undefined) return undefined;
    const waiting = this.waiting.get(id);
    this.waiting.delete(id);
    return waiting;
  }

  private async call(invocationId: string, name: string, input: unknown): Promise<void> {
    // The broker gives an invocation again when it does not know that it runs.
    if (this.calls.has(invocationId)) return;
    const handler = this.handlers.get(name);
    const aborter = new AbortController();
    this.calls.set(invocationId, aborter);
    let outcome: { output: unknown } | { error: string };
    try {
      if (!handler) throw new RunnerError('handler_unavailable', 'handler_unavailable', false);
      const output = (await handler(input, { invocationId, signal: aborter.signal, session: this })) ?? null;
      // Before the result is sent: a result that cannot be sent would never end the invocation.
      if (Buffer.byteLength(encode(output)) > MAX_OUTPUT_BYTES) {
        throw new RunnerError('output_too_large', 'output_too_large', false);
      }
      outcome = { output };
    } catch (error) {
      outcome = { error: describe(error) };
    }
    // A cancelled call has its end already.
    if (this.calls.get(invocationId) !== aborter) return;
    this.calls.delete(invocationId);
    try {
      await this.request('handler_result', { invocation_id: invocationId, ...outcome });
    } catch (error) {
      this.onProblem(error);
    }
  }
}

/** Writes JSON as it is read everywhere: halves of a character, which are escaped and refused there, are replaced. */
function encode(value: unknown): string {
  const text: string | undefined = JSON.stringify(value);
  if (text === undefined) throw new TypeError(`a ${typeof value} is not JSON`);
  return text.replace(/\\\\|\\ud[89a-f][0-9a-f]{2}/g, (found) => (found === '\\\\' ? found : '\ufffd'));
}

function describe(error: unknown): string {
  try {
    return String(error instanceof Error ? error.message : error).slice(0, MAX_ERROR);
  } catch {
    return 'the handler has failed with something that has no text';
  }
}

function disconnected(): RunnerError {
  return new RunnerError('disconnected', 'the connection to the broker was lost', true);
}
