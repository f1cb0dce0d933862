// Channels, and the messages of the selected one: history from the log, then live events.

import { $, atEnd, atMostEvery, count, el, hint, onceAFrame, time, why } from './dom.js';

/** Maximum messages of a channel; the oldest are dropped first. */
const MAX_MESSAGES = 300;
/** Maximum channels in the list. */
const MAX_CHANNELS = 500;
const PAGE = 50;

export class Channels {
  #api;
  #channels = new Map();
  #selected = null;
  #messages = new Map();
  #loading = false;
  #readable = true;
  #refused = false;
  /** Channel whose button gets the focus once it is drawn. */
  #focusOn = null;
  #stopped = false;
  #draw = onceAFrame(() => this.#drawMessages());
  #list = onceAFrame(() => this.#drawChannels());

  constructor(api) {
    this.#api = api;
    this.refreshSoon = atMostEvery(1500, () => this.refresh());
    hint($('channels-panel'), null);
    $('message-list').replaceChildren();
    $('channels').replaceChildren();
    $('older').onclick = () => this.#loadOlder();
    this.refresh();
  }

  stop() {
    this.#stopped = true;
  }

  async refresh() {
    if (this.#stopped || this.#refused) return;
    try {
      const rows = await this.#api.get('/v1/channels');
      if (this.#stopped) return;
      const before = this.#channels;
      this.#channels = new Map(
        rows.slice(0, MAX_CHANNELS).map((row) => [row.name, { name: row.name, topic: row.topic, members: row.member_count, fresh: before.get(row.name)?.fresh ?? 0 }]),
      );
      hint($('channels-panel'), null);
      if (this.#selected === null) {
        const first = this.#channels.has('general') ? 'general' : this.#channels.keys().next().value;
        if (first !== undefined) this.select(first);
      }
      this.#list();
    } catch (error) {
      this.#refused = error.status === 403 || error.status === 401;
      if (this.#channels.size === 0) hint($('channels-panel'), why(error, 'channels:read'));
    }
  }

  /** Selects the channel `step` places further, wrapping around. */
  move(step) {
    const names = [...this.#channels.keys()];
    if (names.length === 0) return;
    const at = names.indexOf(this.#selected);
    this.select(names[(at + step + names.length) % names.length]);
    this.#focusOn = this.#selected;
  }

  async select(name) {
    this.#selected = name;
    this.#messages = new Map();
    this.#readable = true;
    $('messages-title').textContent = `Messages in #${name}`;
    $('older').hidden = true;
    hint($('messages'), null);
    const channel = this.#channels.get(name);
    if (channel) channel.fresh = 0;
    this.#list();
    this.#draw();
    await this.#load({});
    const list = $('message-list');
    requestAnimationFrame(() => list.scrollTo(0, list.scrollHeight));
  }

  async #loadOlder() {
    const oldest = this.#inOrder().find((message) => !message.reply)?.id;
    if (oldest !== undefined) await this.#load({ before: oldest });
  }

  /** Loads a page of history before the messages shown. */
  async #load({ before }) {
    if (this.#loading && before !== undefined) return;
    const name = this.#selected;
    this.#loading = true;
    try {
      const rows = await this.#api.get(`/v1/channels/${encodeURIComponent(name)}/messages`, { limit: PAGE, before });
      if (this.#stopped || name !== this.#selected) return;
      // A message that arrived as an event meanwhile may be in the page too; it is kept once.
      for (const row of rows) {
        this.#messages.set(row.id, { id: row.id, who: row.agent_name, text: row.text, at: row.created_at, replies: row.reply_count });
      }
      $('older').hidden = rows.length < PAGE || this.#messages.size >= MAX_MESSAGES;
      this.#draw();
    } catch (error) {
      if (this.#stopped || name !== this.#selected) return;
      this.#readable = error.status !== 403;
      if (this.#messages.size === 0) hint($('messages'), why(error, 'messages:read'));
    } finally {
      this.#loading = false;
    }
  }

  /** Applies an event to channels and messages. `past`: it happened before this page was opened. */
  onEvent(event, past) {
    if (event.type.startsWith('channel.')) this.refreshSoon();
    if (event.type !== 'message.created' && event.type !== 'thread.reply') return;
    const name = event.channel;
    if (typeof name !== 'string') return;
    if (name === this.#selected) {
      const { id, agent_name: who, text } = event.message ?? {};
      if (typeof id !== 'string' || this.#messages.has(id)) return;
      this.#messages.set(id, { id, who, text, at: event.created_at, reply: event.type === 'thread.reply' });
      if (!this.#readable) hint($('messages'), null);
      this.#draw();
    } else if (!past) {
      const channel = this.#channels.get(name);
      if (channel) {
        channel.fresh += 1;
        this.#list();
      } else {
        this.refreshSoon();
      }
    }
  }

  #drawChannels() {
    const list = $('channels');
    const focused = this.#focusOn ?? (list.contains(document.activeElement) ? document.activeElement.dataset.name : null);
    this.#focusOn = null;
    list.replaceChildren(
      ...[...this.#channels.values()].map((channel) => {
        const fresh = channel.fresh > 0 ? el('span', { class: 'fresh', 'aria-label': `${channel.fresh} new` }, count(channel.fresh)) : '';
        const button = el(
          'button',
          { type: 'button', 'data-name': channel.name, 'aria-current': channel.name === this.#selected ? 'true' : null, title: channel.topic ?? null },
          el('span', {}, `#${channel.name}`),
          fresh,
        );
        button.addEventListener('click', () => this.select(channel.name));
        return el('li', {}, button);
      }),
    );
    if (focused !== null) [...list.querySelectorAll('button')].find((button) => button.dataset.name === focused)?.focus();
  }

  /** Sorts the messages by id, which is by age; drops the oldest above the limit. */
  #inOrder() {
    const byAge = [...this.#messages.values()].sort((a, b) => a.id.length - b.id.length || (a.id < b.id ? -1 : 1));
    for (const message of byAge.splice(0, Math.max(0, byAge.length - MAX_MESSAGES))) this.#messages.delete(message.id);
    return byAge;
  }

  #drawMessages() {
    const list = $('message-list');
    const follow = atEnd(list);
    list.replaceChildren(
      ...this.#inOrder().map((message) =>
        el(
          'li',
          { 'data-id': message.id, class: message.reply ? 'reply' : null },
          el('span', { class: 'who' }, message.who ?? 'unknown'),
          time(message.at),
          message.replies > 0 ? el('span', { class: 'muted' }, ` ${count(message.replies)} replies`) : '',
          el('div', {}, message.text ?? ''),
        ),
      ),
    );
    if (follow) list.scrollTo(0, list.scrollHeight);
  }
}
