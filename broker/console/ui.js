// Parts that all pages share: the base class of a page, navigation (state in the URL), dialogs, small components.

import { Component, Fragment, createRef, h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";
import { Away, Problem, now } from "./api.js";
import { count } from "./format.js";

export { Component, Fragment, createRef, render };
export const html = htm.bind(h);

// --- navigation -------------------------------------------------------------------------------------

// All state is in the URL, so that it can be sent to a colleague.
export function here() {
  const [, , page = "", ns, topic] = location.pathname.split("/").map(decodeURIComponent);
  return { page: page || "overview", ns, topic, query: new URLSearchParams(location.search), key: location.pathname };
}

let moved = () => {};
export const onMove = (handler) => {
  moved = handler;
};

export function go(path, { replace = false, state = null } = {}) {
  history[replace ? "replaceState" : "pushState"](replace ? history.state : state, "", path);
  moved();
}

// Go to the same page with changed query parameters; null removes one.
export function goQuery(changes, { replace = false, state = null } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value == null || value === "") query.delete(name);
    else query.set(name, value);
  }
  go(query.size ? `${location.pathname}?${query}` : location.pathname, { replace, state });
}

// The daemon pages forwards only. "Previous" goes back in the history, or to the first page if a link led to this one.
export const nextPage = (name, after) => goQuery({ [name]: after }, { state: { paged: name } });

export function previousPage(name) {
  if (history.state?.paged === name) history.back();
  else goQuery({ [name]: null });
}

export const topicUrl = (ns, topic) => `/console/topics/${encodeURIComponent(ns)}/${encodeURIComponent(topic)}`;
export const producersUrl = (ns, topic) => `/console/producers/${encodeURIComponent(ns)}/${encodeURIComponent(topic)}`;
export const transactionUrl = (id) => `/console/transactions?open=${id}`;

export function TopicLink({ name }) {
  const [ns, topic] = name.split(":");
  return html`<a href=${topicUrl(ns, topic)}>${name}</a>`;
}

// Minimum interval between two loads caused by events.
const PAUSE_MS = 1000;
// Maximum pause before a refused load is retried.
const MOST_PAUSE_MS = 15000;
// Interval at which ages and deadlines are redrawn.
const TICK_MS = 1000;

// --- a page -----------------------------------------------------------------------------------------

// Loads when it is shown, when its query changes, and when the daemon sends an event. Until a load has ended, the
// previous data stays.
export class Page extends Component {
  title = "";

  componentDidMount() {
    document.title = `${this.title} · Plainsong`;
    this.props.app.live.attach(this);
    this.ticking = setInterval(() => this.tick(), TICK_MS);
  }

  componentDidUpdate(previous) {
    if (previous.route.query.toString() !== this.props.route.query.toString()) this.moved(previous.route.query);
  }

  componentWillUnmount() {
    this.gone = true;
    clearInterval(this.ticking);
    this.props.app.live.detach(this);
  }

  // An idle daemon sends nothing, but time passes. While it is unavailable, or the page is hidden, nothing is redrawn.
  tick() {
    if (this.state.at && this.props.app.live.word === "live") this.setState({ ticked: now() });
  }

  // The time for which ages and deadlines are shown; `at` is the time of the data.
  get when() {
    return Math.max(this.state.at ?? 0, this.state.ticked ?? 0);
  }

  // Called when the query in the URL has changed.
  moved() {
    this.setState({ error: null });
    this.refresh().catch(() => {});
  }

  get query() {
    return this.props.route.query;
  }

  // The query parameters of the event stream.
  interest() {
    return { kinds: "attention" };
  }

  onEvent() {
    this.refreshSoon();
  }

  get pauseMs() {
    return PAUSE_MS;
  }

  // Refresh, but not before pauseMs has passed since the last load: a busy daemon sends events all the time.
  refreshSoon() {
    if (this.soon) return;
    this.soon = setTimeout(() => {
      this.soon = null;
      if (!this.gone && this.props.app.live.word === "live") this.refresh().catch(() => {});
    }, Math.max(0, this.pauseMs - (Date.now() - (this.loadedAt ?? 0))));
  }

  // Retry a load that was refused temporarily after Retry-After: without traffic, no event would cause one.
  retry({ retryMs }) {
    if (!retryMs || this.again) return;
    this.again = setTimeout(() => {
      this.again = null;
      this.refreshSoon();
    }, Math.min(Math.max(PAUSE_MS, retryMs), MOST_PAUSE_MS));
  }

  async load() {}

  // Handle the error of a part that loads on its own; the next load clears it.
  failed(error) {
    this.missed = error;
    this.refused(error);
  }

  // Handle the error of an action; it stays until the page moves, since events cause loads all the time.
  refused(error) {
    if (error instanceof Away) this.props.app.live.lost();
    else if (!(error instanceof Problem)) throw error;
    else if (!this.gone && error.status !== 401) this.setState({ error });
  }

  // Run one load at a time; requests during a load cause one more after it. Raises Away.
  refresh() {
    if (this.loading) {
      this.wanted = true;
      return this.loading;
    }
    this.loading = (async () => {
      do {
        this.wanted = false;
        try {
          await this.load();
          this.loadedAt = Date.now();
          if (!this.gone) this.setState(({ error }) => (error === this.missed ? { error: null } : null));
        } catch (error) {
          if (error instanceof Away) {
            this.props.app.live.lost();
            throw error;
          }
          if (!(error instanceof Problem)) throw error;
          if (!this.gone && error.status !== 401) this.setState({ error: (this.missed = error) });
          this.retry(error);
        }
      } while (this.wanted && !this.gone);
    })().finally(() => {
      this.loading = null;
    });
    return this.loading;
  }
}

// --- parts ------------------------------------------------------------------------------------------

export function ErrorPanel({ error }) {
  if (!error) return null;
  return html`<div class="error" role="status" data-testid="error">
    <strong>${error.message}</strong>
    ${error.hint && html`<span>${error.hint}</span>`}
    ${error.outcome === "unknown" && html`<span>The request may have taken effect: its outcome is unknown.</span>`}
    ${error.requestId && html`<span class="muted">request <code>${error.requestId}</code></span>`}
  </div>`;
}

export function Stat({ id, label, value, title }) {
  return html`<div class="stat"><dt>${label}</dt><dd data-testid=${id} title=${title}>${value}</dd></div>`;
}

// A table that scrolls on its own if it is wider than the window.
export function TableFrame({ label, children }) {
  return html`<div class="table" role="region" aria-label=${label} tabindex="0">${children}</div>`;
}

// The header of a sortable column.
export function SortHead({ column, label, sort, order, onSort, number = false }) {
  const active = sort === column;
  const direction = order === "desc" ? "descending" : "ascending";
  return html`<th scope="col" class=${number ? "number" : ""} aria-sort=${active ? direction : "none"}>
    <button type="button" class="sort" data-testid=${`sort-${column}`} onClick=${() => onSort(column)}>
      ${label}<span aria-hidden="true">${active ? (order === "desc" ? " ↓" : " ↑") : ""}</span>
    </button>
  </th>`;
}

// A row that the keys j and k reach and Enter opens.
export function Row({ open, children, opened, ...rest }) {
  return html`<tr
    tabindex="-1"
    data-row
    aria-expanded=${opened}
    onKeyDown=${(event) => {
      if (event.key === "Enter" && event.target === event.currentTarget && open) {
        event.preventDefault();
        open();
      }
    }}
    ...${rest}
  >
    ${children}
  </tr>`;
}

// An option with its value as an attribute too, for programs that drive a browser.
export function Option({ value, chosen }) {
  return html`<option value=${value} selected=${value === chosen} ref=${(option) => option?.setAttribute("value", value)}>${value}</option>`;
}

export const PAGE_ROWS = 100;

// The pager of a long list. Only one page of the list is in the document.
export function Pager({ from, total, onMove, name = "rows", size = PAGE_ROWS }) {
  if (total <= size) return null;
  return html`<p class="pager">
    <button type="button" data-testid=${`${name}-previous`} disabled=${from === 0} onClick=${() => onMove(Math.max(0, from - size))}>Previous</button>
    <button type="button" data-testid=${`${name}-next`} disabled=${from + size >= total} onClick=${() => onMove(from + size)}>Next</button>
    <span>${count(from + 1)}–${count(Math.min(total, from + size))} of ${count(total)}</span>
  </p>`;
}

export function Spark({ values, label }) {
  if (!values || values.length < 2) return html`<span class="spark" data-testid="spark"></span>`;
  const most = Math.max(...values, 1);
  const step = 60 / (values.length - 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)},${(15 - (14 * value) / most).toFixed(1)}`).join(" ");
  return html`<svg class="spark" data-testid="spark" viewBox="0 0 60 16" role="img" aria-label=${label} preserveAspectRatio="none">
    <polyline points=${points} fill="none" stroke="currentColor" stroke-width="1" vector-effect="non-scaling-stroke" />
  </svg>`;
}

// A field that follows the URL, even after a link or the back button.
export class FilterField extends Component {
  field = createRef();

  componentDidUpdate({ shown }) {
    const field = this.field.current;
    // While the user types, the URL follows the field.
    if (shown !== this.props.shown && (!this.props.typing || field !== document.activeElement)) field.value = this.props.shown ?? "";
  }

  render({ shown, typing, ...rest }) {
    return html`<input ref=${this.field} data-filter spellcheck="false" defaultValue=${shown ?? ""} ...${rest} />`;
  }
}

// A button that is disabled if the user lacks the verb.
export function Guarded({ app, verb, on, children, disabled, title, ...rest }) {
  const may = app.may(verb, on);
  return html`<button type="button" disabled=${disabled || !may} title=${may ? title : `needs the verb ${verb} on ${on}`} ...${rest}>${children}</button>`;
}

export async function copy(app, text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers offer the clipboard only on HTTPS and on localhost.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "offscreen";
    document.body.append(area);
    const focused = document.activeElement;
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
  app.say(`${what} copied`);
}

// --- dialogs ----------------------------------------------------------------------------------------

// A modal dialog, which returns the focus when it closes.
export class Dialog extends Component {
  dialog = createRef();

  componentDidMount() {
    this.before = document.activeElement;
    this.dialog.current.showModal();
  }

  componentWillUnmount() {
    // Close first: nothing else can take the focus while the dialog is open.
    this.dialog.current?.close();
    this.before?.focus?.();
  }

  render({ title, close, children, ...rest }) {
    return html`<dialog ref=${this.dialog} aria-labelledby="dialog-title" onClose=${close} onCancel=${close} ...${rest}>
      <h2 id="dialog-title">${title}</h2>
      ${children}
    </dialog>`;
  }
}

// Asks before a change. `question` is {title, lines, name, action, run}: the user types `name`, then `run` is called.
export class Confirm extends Component {
  constructor() {
    super();
    this.state = { typed: "", error: null, busy: false };
  }

  async run() {
    this.setState({ busy: true, error: null });
    try {
      await this.props.question.run();
      this.props.close();
    } catch (error) {
      this.setState({ busy: false, error });
    }
  }

  render({ question, close }, { typed, error, busy }) {
    const ready = !question.name || typed === question.name;
    return html`<${Dialog} title=${question.title} close=${close}>
      <form
        onSubmit=${(event) => {
          event.preventDefault();
          if (ready && !busy) this.run();
        }}
      >
        <div data-testid="confirm-text">${question.lines.map((line) => html`<p>${line}</p>`)}</div>
        ${question.name &&
        html`<label><span>Type <strong>${question.name}</strong> to confirm</span><input data-testid="confirm-name" autocomplete="off" spellcheck="false" value=${typed} onInput=${(event) => this.setState({ typed: event.currentTarget.value })} /></label>`}
        ${error && html`<${ErrorPanel} error=${error} />`}
        <p class="buttons">
          <button type="button" data-testid="cancel" onClick=${close}>Cancel</button>
          <button type="submit" class=${question.harmless ? "primary" : "danger"} data-testid="confirm" disabled=${!ready || busy}>${question.action}</button>
        </p>
      </form>
    </${Dialog}>`;
  }
}
