// DOM helpers. Data from the engine is only ever set as text.

export const $ = (id) => document.getElementById(id);

/** Creates an element with attributes and children; strings become text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, '');
    else if (value !== false && value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (typeof child === 'object' && child !== null ? child : String(child ?? ''))));
  return element;
}

const number = new Intl.NumberFormat();
export const count = (value) => (typeof value === 'number' ? number.format(value) : '–');

/** Formats a time, with its date if not today; the title has the exact instant. */
export function time(iso) {
  const at = new Date(iso ?? '');
  if (Number.isNaN(at.getTime())) return el('span', { class: 'muted' }, '–');
  const today = at.toDateString() === new Date().toDateString();
  const text = today ? at.toLocaleTimeString() : `${at.toLocaleDateString()} ${at.toLocaleTimeString()}`;
  return el('time', { datetime: at.toISOString(), title: at.toISOString() }, text);
}

/** Minimum interval between two draws, in milliseconds. */
const DRAW_EVERY = 100;

/** Schedules `draw` for one of the next frames, once for any number of calls. */
export function onceAFrame(draw) {
  let asked = false;
  let last = -Infinity;
  const frame = (now) => {
    if (now - last < DRAW_EVERY) {
      requestAnimationFrame(frame);
      return;
    }
    asked = false;
    last = now;
    draw();
  };
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(frame);
  };
}

/** Runs `act` soon, at most once in `pause` milliseconds. */
export function atMostEvery(pause, act) {
  let timer = null;
  let last = -Infinity;
  return () => {
    if (timer !== null) return;
    const wait = Math.max(0, last + pause - performance.now());
    timer = setTimeout(() => {
      timer = null;
      last = performance.now();
      act();
    }, wait);
  };
}

/** Whether a list is scrolled to its end, so that it may follow what is appended. */
export const atEnd = (list) => list.scrollHeight - list.scrollTop - list.clientHeight < 40;

/** Shows a hint instead of a panel's content; `null` shows the content. */
export function hint(panel, text) {
  const line = panel.querySelector('.hint');
  line.textContent = text ?? '';
  line.hidden = text === null;
  for (const child of panel.children) {
    if (child !== line && child.tagName !== 'H2' && !child.hasAttribute('data-own')) child.classList.toggle('gone', text !== null);
  }
}

/** Explains why a panel is empty. */
export function why(error, scope) {
  if (error.code === 'insufficient_scope') return `This token does not show them: it lacks the scope ${scope}.`;
  if (error.status === 429) return 'Too many requests. This panel will retry.';
  if (error.status === 0 || error.status >= 500) return 'The engine is unavailable. This panel will retry.';
  return error.message;
}
