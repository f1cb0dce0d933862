// Small helpers. What comes from the engine is only ever set as text.

export const $ = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
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

/** A time of today as a time, an older one with its date; the exact instant in the title. */
export function time(iso) {
  const at = new Date(iso ?? '');
  if (Number.isNaN(at.getTime())) return el('span', { class: 'muted' }, '–');
  const today = at.toDateString() === new Date().toDateString();
  const text = today ? at.toLocaleTimeString() : `${at.toLocaleDateString()} ${at.toLocaleTimeString()}`;
  return el('time', { datetime: at.toISOString(), title: at.toISOString() }, text);
}

/** Draws are this far apart, in milliseconds. */
const DRAW_EVERY = 100;

/** Runs `draw` in one of the next frames, once however often it is asked for. */
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

/** Shows a hint in a panel instead of its content; `null` shows the content. */
export function hint(panel, text) {
  const line = panel.querySelector('.hint');
  line.textContent = text ?? '';
  line.hidden = text === null;
  for (const child of panel.children) {
    if (child !== line && child.tagName !== 'H2' && !child.hasAttribute('data-own')) child.classList.toggle('gone', text !== null);
  }
}

/** Why a panel stays empty, for people. */
export function why(error, scope) {
  if (error.code === 'insufficient_scope') return `This token does not show them: it lacks the scope ${scope}.`;
  if (error.status === 429) return 'Too many requests for now. This panel comes back by itself.';
  if (error.status === 0 || error.status >= 500) return 'No answer from the engine. This panel comes back by itself.';
  return error.message;
}
