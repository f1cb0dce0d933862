/** A runner: a session that is opened again when it breaks. */

import { WebSocket } from 'ws';

import { connectionFile, readConnection, type Connection } from './connection.js';
import { Drive } from './drive.js';
import { RunnerError, type AgentSpec, type Manifest, type MessageInput } from './frames.js';
import { Session, type Handler } from './session.js';

const CLIENT = { name: 'relay-runner', version: '0.1.0' };
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5000;
/** Close code of a runner whose place another has taken. */
const SUPERSEDED = 4001;

export interface RunnerOptions {
  manifest: Manifest;
  handlers: Record<string, Handler>;
  /** The broker, or the path of its connection file. Default: the file of the working directory. */
  connection?: Connection | string;
  /** Hears of problems that no caller gets: lost connections, refused results. */
  onProblem?: (error: unknown) => void;
}

export class Runner {
  private session: Session | undefined;
  private socket: WebSocket | undefined;
  private timer: NodeJS.Timeout | undefined;
  private pauseMs = FIRST_PAUSE_MS;
  private isStopping = false;
  private readonly handlers: ReadonlyMap<string, Handler>;
  private readonly onProblem: (error: unknown) => void;
  private end!: (reason: 'stopped' | 'superseded') => void;
  /** Resolves when the runner does not reconnect any more. */
  readonly ended: Promise<'stopped' | 'superseded'>;

  constructor(private readonly options: RunnerOptions) {
    this.handlers = new Map(Object.entries(options.handlers));
    this.onProblem = options.onProblem ?? (() => {});
    this.ended = new Promise((resolve) => (this.end = resolve));
  }

  /** Connects and registers. From then on a lost connection is opened again. */
  async start(): Promise<void> {
    await this.connect();
  }

  /** Withdraws everything and disconnects. */
  async stop(): Promise<void> {
    this.isStopping = true;
    clearTimeout(this.timer);
    if (!this.session) return this.end('stopped');
    try {
      await this.session.deregister();
    } finally {
      this.socket?.close();
    }
    await this.ended;
  }

  spawn(agent: AgentSpec, options?: Parameters<Session['spawn']>[1]): Promise<unknown> {
    return this.request((session) => session.spawn(agent, options));
  }

  send(message: MessageInput): Promise<unknown> {
    return this.request((session) => session.send(message));
  }

  listAgents(): Promise<Record<string, unknown>[]> {
    return this.request((session) => session.listAgents());
  }

  release(name: string, reason?: string): Promise<unknown> {
    return this.request((session) => session.request('release_agent', { name, ...(reason ? { reason } : {}) }));
  }

  /** Takes control of an agent's terminal. */
  async drive(name: string): Promise<Drive> {
    return Drive.begin(await this.connection(), name);
  }

  private request<T>(ask: (session: Session) => Promise<T>): Promise<T> {
    if (this.session) return ask(this.session);
    return Promise.reject(new RunnerError('disconnected', 'the runner is not connected to its broker', true));
  }

  /** Read again for each connection: a broker that was restarted has another port. */
  private connection(): Promise<Connection> {
    const given = this.options.connection ?? connectionFile();
    return typeof given === 'string' ? readConnection(given) : Promise.resolve(given);
  }

  private async connect(): Promise<void> {
    const { url, apiKey } = await this.connection();
    if (this.isStopping) return;
    const socket = new WebSocket(`${url.replace(/^http/, 'ws')}/api/fleet/ws`, { headers: { 'x-api-key': apiKey } });
    const session = new Session({ send: (text) => socket.send(text) }, this.handlers, this.onProblem);
    this.socket = socket;
    socket.on('message', (data, isBinary) => {
      if (!isBinary) session.onText(String(data));
    });
    await new Promise<void>((resolve, reject) => {
      socket.once('open', resolve);
      socket.once('error', reject);
    });
    socket.on('error', this.onProblem);
    socket.on('close', (code) => this.onClose(session, code));
    try {
      if (!this.isStopping) await session.register(CLIENT, this.options.manifest);
      // `stop` has found no session that it could withdraw.
      if (this.isStopping) await session.deregister();
    } catch (error) {
      socket.close();
      throw error;
    }
    if (this.isStopping) return socket.close();
    this.session = session;
    this.pauseMs = FIRST_PAUSE_MS;
  }

  private onClose(session: Session, code: number): void {
    session.onClose();
    if (this.session !== session) return;
    this.session = undefined;
    if (this.isStopping) return this.end('stopped');
    if (code === SUPERSEDED) return this.end('superseded');
    this.onProblem(new RunnerError('disconnected', `the broker has closed the connection (${code})`, true));
    this.reconnectLater();
  }

  private reconnectLater(): void {
    this.timer = setTimeout(() => {
      this.connect().catch((error: unknown) => {
        this.onProblem(error);
        if (!this.isStopping) this.reconnectLater();
      });
    }, this.pauseMs);
    this.pauseMs = Math.min(this.pauseMs * 2, LONGEST_PAUSE_MS);
  }
}
