// Event feed with filters. It keeps the newest events and draws those that pass, newest last.

import { $, atEnd, count, el, onceAFrame, time } from './dom.js';

/** Maximum events kept, and maximum rows drawn. */
const MAX_KEPT = 2000;
const MAX_ROWS = 300;
/** Maximum characters of a row's text. */
const MAX_TEXT = 240;

export class Feed {
  #events = [];
  #seen = 0;
  #types = new Set();
  /** The events as they were when the feed was paused. */
  #frozen = null;
  #filter = { type: '', agent: '', channel: '', text: '' };
  #draw = onceAFrame(() => this.#drawRows());

  constructor() {
    for (const field of Object.keys(this.#filter)) {
      $(`filter-${field}`).oninput = () => this.#readFilters();
    }
    const form = $('filters');
    form.onsubmit = (event) => event.preventDefault();
    // The reset event fires before the fields are cleared.
    form.onreset = () => queueMicrotask(() => this.#readFilters());
    $('pause').onclick = () => this.pause();
    $('types').replaceChildren();
    this.#readFilters();
  }

  /** Pauses or resumes drawing. Events are kept meanwhile. */
  pause() {
    this.#frozen = this.#frozen === null ? this.#events.slice() : null;
    const paused = this.#frozen !== null;
    $('pause').setAttribute('aria-pressed', String(paused));
    $('pause').textContent = paused ? 'Resume' : 'Pause';
    this.#draw();
  }

  onEvent(event) {
    this.#seen += 1;
    this.#events.push(entry(event));
    // Dropped in bulk: removing one per event would move the rest each time.
    if (this.#events.length > MAX_KEPT * 1.25) this.#events = this.#events.slice(-MAX_KEPT);
    if (!this.#types.has(event.type) && this.#types.size < 200) {
      this.#types.add(event.type);
      $('types').append(el('option', { value: event.type }));
    }
    this.#draw();
  }

  #readFilters() {
    for (const field of Object.keys(this.#filter)) {
      this.#filter[field] = $(`filter-${field}`).value.trim().toLowerCase();
    }
    this.#filter.channel = this.#filter.channel.replace(/^#/, '');
    this.#filter.agent = this.#filter.agent.replace(/^@/, '');
    this.#draw();
  }

  #passes(row) {
    const { type, agent, channel, text } = this.#filter;
    return (
      (type === '' || row.type.startsWith(type)) &&
      (agent === '' || row.agent.toLowerCase().includes(agent)) &&
      (channel === '' || row.channel.toLowerCase() === channel) &&
      (text === '' || row.search.includes(text))
    );
  }

  #drawRows() {
    const shown = [];
    let passing = 0;
    const events = this.#frozen ?? this.#events;
    for (let i = events.length - 1; i >= 0; i -= 1) {
      if (!this.#passes(events[i])) continue;
      passing += 1;
      if (shown.length < MAX_ROWS) shown.push(events[i]);
    }
    const filtered = Object.values(this.#filter).some((value) => value !== '');
    const part = filtered ? `${count(passing)} of the newest ${count(events.length)} pass` : `the newest ${count(shown.length)} shown`;
    $('feed-count').textContent = `${count(this.#seen)} events, ${part}${this.#frozen === null ? '' : ', paused'}`;
    const list = $('feed');
    const follow = atEnd(list);
    list.replaceChildren(...shown.reverse().map(row));
    if (follow) list.scrollTo(0, list.scrollHeight);
  }
}

function row({ seq, at, type, agent, channel, what }) {
  const where = channel === '' ? '' : `#${channel} `;
  const who = agent === '' ? '' : `@${agent} `;
  return el(
    'li',
    { 'data-seq': seq },
    el('span', { class: 'seq' }, seq ?? '–'),
    time(at),
    el('span', { class: 'type' }, type),
    el('span', { class: 'what', title: what }, `${where}${who}${what}`),
  );
}

/** Extracts the fields of an event that the feed keeps. */
function entry(event) {
  const { type, seq, created_at: at, ...rest } = event;
  const agent = event.agent_name ?? event.message?.agent_name ?? event.agent?.name ?? event.caller_name ?? event.target_agent_name ?? '';
  const named = event.channel ?? event.channel_name ?? '';
  const channel = typeof named === 'object' ? (named.name ?? '') : named;
  const whole = JSON.stringify(rest);
  const text = event.message?.text ?? event.status ?? event.emoji ?? event.file?.filename ?? whole;
  const what = String(text).slice(0, MAX_TEXT);
  const search = `${type} ${agent} ${channel} ${what} ${whole.slice(0, 2000)}`.toLowerCase();
  return { seq, at, type, agent: String(agent), channel: String(channel), what, search };
}
