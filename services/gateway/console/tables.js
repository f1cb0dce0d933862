// Tables of agents, nodes and mailboxes, refreshed periodically and after relevant events.

import { $, atMostEvery, count, el, hint, time, why } from './dom.js';

/** Maximum rows of a table. */
const MAX_ROWS = 500;
/** Maximum pages of mailboxes to read. */
const MAX_PAGES = 4;

/** Table. `read` fetches the rows, `cells` converts a row to cells. */
class Table {
  #api;
  #options;
  #panel;
  #body;
  #timer = null;
  #stopped = false;
  #refused = false;

  constructor(api, options) {
    this.#api = api;
    this.#options = options;
    this.#panel = $(options.panel);
    this.#body = $(options.body);
    this.soon = atMostEvery(options.soonest, () => this.refresh());
    hint(this.#panel, null);
    this.#body.replaceChildren();
    this.#timer = setInterval(() => {
      if (!document.hidden) this.refresh();
    }, options.every);
    this.refresh();
  }

  stop() {
    this.#stopped = true;
    clearInterval(this.#timer);
  }

  async refresh() {
    if (this.#stopped || this.#refused) return;
    const { read, scope, title } = this.#options;
    try {
      const rows = await read(this.#api);
      if (this.#stopped) return;
      hint(this.#panel, null);
      this.#show(rows);
      const more = rows.length > MAX_ROWS ? `${MAX_ROWS} of ${count(rows.length)}` : count(rows.length);
      $(title).textContent = `${this.#options.name} (${more})`;
    } catch (error) {
      if (this.#stopped) return;
      this.#refused = error.status === 403 || error.status === 401;
      // The content stays while the engine is briefly unavailable.
      if (this.#refused || this.#body.children.length === 0) hint(this.#panel, why(error, scope));
    }
  }

  #show(rows) {
    const { cells, order } = this.#options;
    const sorted = [...rows].sort(order).slice(0, MAX_ROWS);
    this.#body.replaceChildren(...sorted.map((row) => el('tr', {}, ...cells(row))));
  }
}

const byName = (a, b) => (a.name ?? '').localeCompare(b.name ?? '');
const dot = (good) => el('span', { class: good ? 'dot good' : 'dot', 'aria-hidden': 'true' });
const numeric = (value) => el('td', { class: 'num' }, count(value));

/** Formats the presence of an agent, and its activity if it reports one. */
export const agents = (api, onRows) =>
  new Table(api, {
    name: 'Agents',
    panel: 'agents-panel',
    body: 'agents',
    title: 'agents-title',
    scope: 'agents:read',
    every: 15_000,
    soonest: 1000,
    read: async (from) => {
      const rows = await from.get('/v1/agents');
      onRows(rows);
      return rows;
    },
    order: (a, b) => (b.status === 'online') - (a.status === 'online') || byName(a, b),
    cells: (agent) => {
      const doing = agent.activity_status && agent.activity_status !== 'active' && agent.status === 'online';
      return [
        el('td', { title: agent.name }, agent.name),
        el('td', {}, dot(agent.status === 'online'), doing ? `${agent.status}, ${agent.activity_status}` : agent.status),
        el('td', {}, time(agent.last_seen)),
      ];
    },
  });

export const nodes = (api) =>
  new Table(api, {
    name: 'Nodes',
    panel: 'nodes-panel',
    body: 'nodes',
    title: 'nodes-title',
    scope: 'nodes:read',
    every: 5000,
    soonest: 1000,
    read: (from) => from.get('/v1/nodes'),
    order: (a, b) => b.live - a.live || byName(a, b),
    cells: (node) => [
      el('td', { title: `${node.name} (${node.role}, ${node.kind})` }, node.name),
      el('td', {}, dot(node.live), node.live ? 'live' : node.status),
      numeric(node.load),
      el('td', { class: 'num' }, node.max_agents > 0 ? `${count(node.active_agents)} / ${count(node.max_agents)}` : count(node.active_agents)),
      el('td', {}, time(node.last_heartbeat_at)),
    ],
  });

export const mailboxes = (api) =>
  new Table(api, {
    name: 'Deliveries',
    panel: 'mailboxes-panel',
    body: 'mailboxes',
    title: 'mailboxes-title',
    scope: 'deliveries:read',
    every: 5000,
    soonest: 1500,
    read: async (from) => {
      // Sorted by lag, while pages are ordered by agent id: a few pages are read.
      const rows = [];
      for (let page = 0; page < MAX_PAGES; page += 1) {
        const more = await from.get('/v1/observe/mailboxes', { limit: MAX_ROWS, after: rows.at(-1)?.agent_id });
        rows.push(...more);
        if (more.length < MAX_ROWS) break;
      }
      return rows;
    },
    order: (a, b) => b.lag - a.lag || a.agent_name.localeCompare(b.agent_name),
    cells: (mailbox) => [
      el('td', { title: mailbox.agent_name }, mailbox.agent_name),
      numeric(mailbox.last_seq),
      numeric(mailbox.ack_floor),
      numeric(mailbox.settled_floor),
      el('td', { class: mailbox.lag > 0 ? 'num lagging' : 'num' }, count(mailbox.lag)),
    ],
  });
