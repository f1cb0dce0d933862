// Console: shows everything that one observer token may see of its workspace.

import { Api, ApiError } from './api.js';
import { Channels } from './channels.js';
import { $, atMostEvery, count, el, hint, onceAFrame } from './dom.js';
import { Feed } from './feed.js';
import { Follower } from './follower.js';
import * as tables from './tables.js';

/** Storage key of the token: kept for this tab until it closes, and never in a URL. */
const KEY = 'relay.console.token';
const PANELS = ['channels-panel', 'messages', 'agents-panel', 'nodes-panel', 'mailboxes-panel', 'feed-panel'];
const STATS_EVERY = 10_000;

let board = null;

/** Session of one signed-in token. */
class Board {
  #api;
  #parts;
  #follower;
  #timer;
  #agents = null;
  #stats = {};
  #drawStats = onceAFrame(() => this.#showStats());
  #refreshStats = atMostEvery(3000, () => this.#readStats());
  #statsRefused = false;

  constructor(token) {
    this.#api = new Api(token);
    this.feed = new Feed();
    this.channels = new Channels(this.#api);
    const onRows = (rows) => {
      this.#agents = { total: rows.length, online: rows.filter((agent) => agent.status === 'online').length };
      this.#drawStats();
    };
    this.#parts = {
      agents: tables.agents(this.#api, onRows),
      nodes: tables.nodes(this.#api),
      mailboxes: tables.mailboxes(this.#api),
    };
    this.#readStats();
    this.#timer = setInterval(() => document.hidden || this.#refreshStats(), STATS_EVERY);
    hint($('feed-panel'), null);
    this.#follower = new Follower(this.#api, {
      onEvent: (event, seq, past) => this.#onEvent(event, seq, past),
      onState: (state, detail) => this.#onState(state, detail),
    });
    this.#follower.start();
  }

  stop() {
    clearInterval(this.#timer);
    this.#follower.stop();
    this.channels.stop();
    Object.values(this.#parts).forEach((part) => part.stop());
  }

  reconnect() {
    this.#follower.reconnect();
  }

  refresh() {
    Object.values(this.#parts).forEach((part) => part.soon());
    this.channels.refreshSoon();
    this.#refreshStats();
  }

  #onEvent(event, seq, past) {
    $('position').hidden = false;
    $('position-seq').textContent = count(seq ?? 0);
    this.feed.onEvent(event);
    this.channels.onEvent(event, past);
    const { type } = event;
    if (type.startsWith('agent.') || type.startsWith('member.') || type.includes('status')) this.#parts.agents.soon();
    if (type.startsWith('node.')) this.#parts.nodes.soon();
    if (type.startsWith('delivery.') || type.startsWith('message.') || type.includes('dm.') || type === 'thread.reply') {
      this.#parts.mailboxes.soon();
      this.#refreshStats();
    }
  }

  #onState(state, detail = {}) {
    const words = {
      connecting: 'Connecting',
      'catching-up': 'Catching up',
      live: 'Live',
      waiting: detail.seconds ? `Connection lost, again in ${detail.seconds} s` : 'Connection lost',
      ended: detail.reason ?? 'Ended',
    };
    if (state === 'ended' && detail.code === 'insufficient_scope') {
      // Panels are still refreshed periodically.
      words.ended = 'Not live: the token lacks the scope stream:read';
      hint($('feed-panel'), 'This token lacks the scope stream:read.');
    } else if (state === 'ended') {
      signOut(`Signed out: ${detail.reason}`);
      return;
    }
    $('connection').dataset.state = state;
    $('connection-text').textContent = words[state];
    $('reconnect').hidden = state !== 'waiting';
    if (state === 'live') this.refresh();
  }

  async #readStats() {
    if (this.#statsRefused) return;
    try {
      this.#stats = await this.#api.get('/v1/console/stats');
    } catch (error) {
      this.#statsRefused = [401, 403, 404].includes(error.status);
    }
    this.#drawStats();
  }

  #showStats() {
    const { agents = this.#agents, messages, channels, unique_agents: senders, window_days: days } = this.#stats;
    const numbers = [
      ['Agents online', agents && `${count(agents.online)} of ${count(agents.total)}`],
      ['Messages', messages && count(messages.total)],
      ['today', messages && count(messages.today)],
      ['Channels', channels && count(channels.total)],
      [`Senders in ${days} days`, senders !== undefined && count(senders)],
    ];
    const known = numbers.filter(([, value]) => value);
    $('stats').replaceChildren(...known.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))));
  }
}

async function signIn(token) {
  $('token-error').textContent = '';
  if (!token.startsWith('ot_live_')) {
    $('token-error').textContent = 'An observer token begins with ot_live_. Workspace keys and agent tokens are not accepted here.';
    return;
  }
  let workspace;
  try {
    workspace = await new Api(token).get('/v1/workspace');
  } catch (error) {
    const away = !(error instanceof ApiError) || error.status === 0 || error.status >= 500;
    $('token-error').textContent = away ? 'The engine is unavailable. Try again.' : error.message;
    if (!away) sessionStorage.removeItem(KEY);
    return;
  }
  sessionStorage.setItem(KEY, token);
  $('token').value = '';
  $('workspace-name').textContent = workspace.name;
  document.title = `${workspace.name} · Relay console`;
  $('sign-in').hidden = true;
  $('board').hidden = false;
  $('sign-out').hidden = false;
  board = new Board(token);
  $('messages').focus();
}

function signOut(reason) {
  board?.stop();
  board = null;
  sessionStorage.removeItem(KEY);
  document.title = 'Relay console';
  $('workspace-name').textContent = '';
  $('connection').dataset.state = 'out';
  $('connection-text').textContent = 'Signed out';
  for (const id of ['board', 'sign-out', 'reconnect', 'position']) $(id).hidden = true;
  $('sign-in').hidden = false;
  $('token-error').textContent = reason ?? '';
  for (const id of ['channels', 'message-list', 'agents', 'nodes', 'mailboxes', 'feed', 'stats']) $(id).replaceChildren();
  $('token').focus();
}

function onKey(event) {
  const typing = event.target instanceof HTMLInputElement;
  if (event.key === 'Escape' && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || $('keys').open) return;
  if (event.key === '?') $('keys').showModal();
  else if (board === null) return;
  else if (/^[1-6]$/.test(event.key)) $(PANELS[event.key - 1]).focus();
  else if (event.key === 'j') board.channels.move(1);
  else if (event.key === 'k') board.channels.move(-1);
  else if (event.key === 'p') board.feed.pause();
  else if (event.key === 'r') board.reconnect();
  else if (event.key === '/') $('filter-text').focus();
  else return;
  event.preventDefault();
}

$('token-form').addEventListener('submit', (event) => {
  event.preventDefault();
  signIn($('token').value.trim());
});
$('sign-out').addEventListener('click', () => signOut());
$('reconnect').addEventListener('click', () => board?.reconnect());
$('show-keys').addEventListener('click', () => $('keys').showModal());
document.addEventListener('keydown', onKey);
window.addEventListener('online', () => board?.reconnect());
document.addEventListener('visibilitychange', () => document.hidden || board?.refresh());

const kept = sessionStorage.getItem(KEY);
if (kept) signIn(kept);
else $('token').focus();
