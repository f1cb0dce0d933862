// Follows the events of a workspace without gaps: live events from the socket, missed ones from the log.
//
// A connection first buffers events of the socket, reads the log from its cursor to the end, then drops
// duplicates from the buffer. Each event is passed on once, in the order of `seq`. Tokens with filters see
// gaps in `seq`: events that they may not see.

import { ApiError } from './api.js';

const PAGE = 500;
/** Events before the head at which a new page starts. */
const FIRST_EVENTS = 200;
/** Maximum buffered frames while the log is read; beyond it the log is read again. */
const MAX_WAITING = 5000;
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 10_000;
const PING_EVERY = 20_000;
const PONG_WITHIN = 10_000;
/** Frame types that are not events. */
const CONTROL = new Set(['ping', 'pong', 'resync_ack']);

export class Follower {
  #api;
  #onEvent;
  #onState;
  #cursor = null;
  #socket = null;
  /** Incremented when a connection is dropped, so that callbacks of older ones are ignored. */
  #generation = 0;
  #attempt = 0;
  #retry = null;
  #ping = null;
  #lastFrame = 0;
  #ended = false;
  /** Whether the first catch-up is complete. */
  #begun = false;

  /** `onState(state, detail)`: connecting, catching-up, live, waiting, ended. */
  constructor(api, { onEvent, onState }) {
    this.#api = api;
    this.#onEvent = onEvent;
    this.#onState = onState;
  }

  start() {
    this.#connect();
  }

  stop() {
    this.#ended = true;
    this.#drop();
  }

  /** Stops waiting and connects at once. */
  reconnect() {
    if (this.#ended) return;
    this.#attempt = 0;
    this.#connect();
  }

  /** Drops the current connection. */
  #drop() {
    this.#generation += 1;
    clearTimeout(this.#retry);
    clearInterval(this.#ping);
    this.#socket?.close();
    this.#socket = null;
  }

  #connect() {
    this.#drop();
    const generation = this.#generation;
    const current = () => generation === this.#generation;
    this.#onState(this.#cursor === null ? 'connecting' : 'catching-up');
    const socket = this.#api.socket();
    this.#socket = socket;
    let waiting = [];
    let overflowed = false;

    socket.addEventListener('message', ({ data }) => {
      if (!current()) return;
      this.#lastFrame = performance.now();
      const frame = parsed(data);
      if (frame === null || CONTROL.has(frame.type)) return;
      if (waiting === null) {
        this.#take(frame);
      } else if (waiting.length < MAX_WAITING) {
        waiting.push(frame);
      } else {
        overflowed = true;
      }
    });
    socket.addEventListener('open', async () => {
      if (!current()) return;
      this.#keepAlive(socket, current);
      this.#onState('catching-up');
      try {
        do {
          overflowed = false;
          await this.#readLog(current);
          if (!current()) return;
          for (const frame of waiting) this.#take(frame);
          waiting = overflowed ? [] : null;
        } while (waiting !== null);
        this.#attempt = 0;
        this.#begun = true;
        this.#onState('live');
      } catch (error) {
        if (current()) this.#failed(error);
      }
    });
    socket.addEventListener('close', ({ code, reason }) => {
      if (!current()) return;
      if (code === 1008) this.#end(reason || 'The token is no longer valid');
      else this.#askWhy();
    });
  }

  /** Reads all events after the cursor, up to the end of the log. */
  async #readLog(current) {
    if (this.#cursor === null) {
      const { latest_seq: latest } = await this.#api.get('/v1/workspace/events', { since: 0, limit: 1 });
      this.#cursor = Math.max(0, latest - FIRST_EVENTS);
    }
    for (;;) {
      const since = this.#cursor;
      const page = await this.#api.get('/v1/workspace/events', { since, limit: PAGE });
      if (!current()) return;
      for (const event of page.events) this.#take({ ...event.payload, seq: event.seq, type: event.type, created_at: event.created_at });
      this.#cursor = Math.max(this.#cursor, page.next_since);
      if (this.#cursor >= page.latest_seq || this.#cursor === since) return;
    }
  }

  #take(event) {
    if (typeof event.seq === 'number') {
      if (event.seq <= this.#cursor) return;
      this.#cursor = event.seq;
    }
    this.#onEvent(event, this.#cursor, !this.#begun);
  }

  #keepAlive(socket, current) {
    this.#lastFrame = performance.now();
    this.#ping = setInterval(() => {
      if (!current()) return;
      if (performance.now() - this.#lastFrame > PING_EVERY + PONG_WITHIN) {
        // Nothing arrived, not even a reply to a ping: the connection is broken without a close.
        this.#failed(null);
      } else if (socket.readyState === WebSocket.OPEN) {
        socket.send('{"type":"ping"}');
      }
    }, PING_EVERY);
  }

  /** Reads the log to learn why: browsers hide the status of a refused upgrade. */
  async #askWhy() {
    this.#drop();
    const generation = this.#generation;
    this.#onState('waiting');
    let reason = null;
    try {
      await this.#api.get('/v1/workspace/events', { since: this.#cursor ?? 0, limit: 1 });
    } catch (error) {
      reason = error;
    }
    if (generation === this.#generation) this.#failed(reason);
  }

  #failed(error) {
    this.#drop();
    if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
      this.#end(error.message, error.code);
      return;
    }
    const longest = Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** this.#attempt);
    const pause = longest * (0.5 + Math.random() / 2);
    this.#attempt += 1;
    this.#onState('waiting', { seconds: Math.ceil(pause / 1000) });
    this.#retry = setTimeout(() => this.#connect(), pause);
  }

  #end(reason, code) {
    this.#ended = true;
    this.#drop();
    this.#onState('ended', { reason, code });
  }
}

/** Parses a frame; null if it is malformed. */
function parsed(data) {
  try {
    const frame = JSON.parse(data);
    return typeof frame?.type === 'string' ? frame : null;
  } catch {
    return null;
  }
}
