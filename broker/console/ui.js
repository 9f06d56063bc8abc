// What all pages are made of: the base of a page, where one is (the URL), dialogs, small parts.

import { Component, Fragment, createRef, h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";
import { Away, Problem, now } from "./api.js";
import { bytes, count, duration, many, time } from "./format.js";

export { Component, Fragment, createRef, render };
export const html = htm.bind(h);

// --- where one is -----------------------------------------------------------------------------------

// Every state is in the URL, so that it can be sent to a colleague.
export function here() {
  const [, , page = "", ns, topic] = location.pathname.split("/").map(decodeURIComponent);
  return { page: page || "overview", ns, topic, query: new URLSearchParams(location.search), key: location.pathname };
}

let moved = () => {};
export const onMove = (handler) => {
  moved = handler;
};

export function go(path, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", path);
  moved();
}

// The same page with other values in its query; null takes one away.
export function goQuery(changes, { replace = false } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value == null || value === "") query.delete(name);
    else query.set(name, value);
  }
  go(query.size ? `${location.pathname}?${query}` : location.pathname, { replace });
}

export const topicUrl = (ns, topic) => `/console/topics/${encodeURIComponent(ns)}/${encodeURIComponent(topic)}`;
export const producersUrl = (ns, topic) => `/console/producers/${encodeURIComponent(ns)}/${encodeURIComponent(topic)}`;
export const transactionUrl = (id) => `/console/transactions?open=${id}`;

export function TopicLink({ name }) {
  const [ns, topic] = name.split(":");
  return html`<a href=${topicUrl(ns, topic)}>${name}</a>`;
}

// Between two loads of a page that the daemon's events ask for.
const PAUSE_MS = 1000;

// --- a page -----------------------------------------------------------------------------------------

// Loads when it is shown, when what it is about changes, and when the daemon says that something happened. What is there
// stays until there is something newer.
export class Page extends Component {
  title = "";

  componentDidMount() {
    document.title = `${this.title} · Plainsong`;
    this.props.app.live.attach(this);
  }

  componentDidUpdate(previous) {
    if (previous.route.query.toString() !== this.props.route.query.toString()) this.moved(previous.route.query);
  }

  componentWillUnmount() {
    this.gone = true;
    this.props.app.live.detach(this);
  }

  // The query of the page has changed.
  moved() {
    this.refresh().catch(() => {});
  }

  get query() {
    return this.props.route.query;
  }

  // What the stream of events is asked for.
  interest() {
    return { kinds: "attention" };
  }

  onEvent() {
    this.refreshSoon();
  }

  // After so long a pause that a busy daemon is not asked all the time.
  refreshSoon() {
    if (this.soon) return;
    this.soon = setTimeout(() => {
      this.soon = null;
      if (!this.gone && this.props.app.live.word === "live") this.refresh().catch(() => {});
    }, Math.max(0, PAUSE_MS - (Date.now() - (this.loadedAt ?? 0))));
  }

  async load() {}

  // What went wrong beside a load.
  failed(error) {
    if (error instanceof Away) this.props.app.live.lost();
    else if (!(error instanceof Problem)) throw error;
    else if (!this.gone && error.status !== 401) this.setState({ error });
  }

  // One load at a time; what comes meanwhile is one more. Raises Away.
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
          if (!this.gone && this.state.error) this.setState({ error: null });
        } catch (error) {
          if (error instanceof Away) {
            this.props.app.live.lost();
            throw error;
          }
          if (!(error instanceof Problem)) throw error;
          if (!this.gone && error.status !== 401) this.setState({ error });
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
  return html`<div class="error" role="alert" data-testid="error">
    <strong>${error.message}</strong>
    ${error.hint && html`<span>${error.hint}</span>`}
    ${error.outcome === "unknown" && html`<span>It is not known whether it happened.</span>`}
    ${error.requestId && html`<span class="muted">request <code>${error.requestId}</code></span>`}
  </div>`;
}

export function Stat({ id, label, value, title }) {
  return html`<div class="stat"><dt>${label}</dt><dd data-testid=${id} title=${title}>${value}</dd></div>`;
}

// A table that scrolls by itself when it is wider than the window.
export function TableFrame({ label, children }) {
  return html`<div class="table" role="region" aria-label=${label} tabindex="0">${children}</div>`;
}

// The head of a column that sorts.
export function SortHead({ column, label, sort, order, onSort, number = false }) {
  const active = sort === column;
  const direction = order === "desc" ? "descending" : "ascending";
  return html`<th scope="col" class=${number ? "number" : ""} aria-sort=${active ? direction : "none"}>
    <button type="button" class="sort" data-testid=${`sort-${column}`} onClick=${() => onSort(column)}>
      ${label}<span aria-hidden="true">${active ? (order === "desc" ? " ↓" : " ↑") : ""}</span>
    </button>
  </th>`;
}

// A row that the keyboard reaches by j and k, and opens by Enter.
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

// An option, with its value as an attribute too: programs that drive a browser look for it.
export function Option({ value, chosen }) {
  return html`<option value=${value} selected=${value === chosen} ref=${(option) => option?.setAttribute("value", value)}>${value}</option>`;
}

export const PAGE_ROWS = 100;

// Which rows of a long list are in the document: never more than a hundred.
export function Pager({ from, total, onMove, name = "rows" }) {
  if (total <= PAGE_ROWS) return null;
  return html`<p class="pager">
    <button type="button" data-testid=${`${name}-previous`} disabled=${from === 0} onClick=${() => onMove(Math.max(0, from - PAGE_ROWS))}>Previous</button>
    <button type="button" data-testid=${`${name}-next`} disabled=${from + PAGE_ROWS >= total} onClick=${() => onMove(from + PAGE_ROWS)}>Next</button>
    <span>${count(from + 1)}–${count(Math.min(total, from + PAGE_ROWS))} of ${count(total)}</span>
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

// A button of something that a name may or may not do.
export function Guarded({ app, verb, on, children, disabled, title, ...rest }) {
  const may = app.may(verb, on);
  return html`<button type="button" disabled=${disabled || !may} title=${may ? title : `needs the verb ${verb} on ${on}`} ...${rest}>${children}</button>`;
}

export async function copy(app, text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Not offered on plain HTTP beyond this machine.
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

// --- asking before something changes ----------------------------------------------------------------

// `question` is {title, lines, name, action, run}: `name` has to be typed, `run` does it.
export class Confirm extends Component {
  dialog = createRef();

  constructor() {
    super();
    this.state = { typed: "", error: null, busy: false };
  }

  componentDidMount() {
    this.before = document.activeElement;
    this.dialog.current.showModal();
  }

  componentWillUnmount() {
    // While it is open nothing else can have the focus.
    this.dialog.current?.close();
    this.before?.focus?.();
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
    return html`<dialog ref=${this.dialog} aria-labelledby="confirm-title" onClose=${close} onCancel=${close}>
      <form
        onSubmit=${(event) => {
          event.preventDefault();
          if (ready && !busy) this.run();
        }}
      >
        <h2 id="confirm-title">${question.title}</h2>
        <div data-testid="confirm-text">${question.lines.map((line) => html`<p>${line}</p>`)}</div>
        ${question.name &&
        html`<label>Type <strong>${question.name}</strong> to confirm<input data-testid="confirm-name" autocomplete="off" spellcheck="false" value=${typed} onInput=${(event) => this.setState({ typed: event.currentTarget.value })} /></label>`}
        ${error && html`<${ErrorPanel} error=${error} />`}
        <p class="buttons">
          <button type="button" data-testid="cancel" onClick=${close}>Cancel</button>
          <button type="submit" class="danger" data-testid="confirm" disabled=${!ready || busy}>${question.action}</button>
        </p>
      </form>
    </dialog>`;
  }
}

// What a preview of section "No regret" says, in sentences.
export function effectLines({ effect = {}, warnings = [] }) {
  const lines = [];
  const said = { hides: "become invisible", returns: "become visible again", removes: "are removed" };
  for (const [name, words] of Object.entries(said)) {
    const found = effect[name];
    if (!found || !found.messages) continue;
    const span = found.oldestMs ? `, published between ${time(found.oldestMs)} and ${time(found.newestMs)}` : "";
    lines.push(`${count(found.messages, found.estimated)} messages (${bytes(found.bytes, found.estimated)}) ${words}${span}.`);
  }
  if (effect.topics?.length) {
    const total = effect.topics.reduce((sum, each) => sum + (each.messages ?? 0), 0);
    const names = effect.topics.map((each) => `${each.topic} (${count(each.messages)})`).join(", ");
    lines.push(`${count(total)} messages in ${effect.topics.length} topics disappear: ${names}.`);
  }
  if (effect.releases) {
    const { heldPolls = 0, hiddenMessages = 0 } = effect.releases;
    lines.push(`${count(heldPolls)} waiting polls go on, and ${count(hiddenMessages)} messages behind it become visible.`);
  }
  const counts = ["readers", "producers", "openTransactions", "parkedPolls"]
    .filter((name) => effect[name] > 0)
    .map((name) => `${count(effect[name])} ${{ readers: "readers", producers: "producers", openTransactions: "open transactions", parkedPolls: "waiting polls" }[name]}`);
  if (counts.length) lines.push(`It also concerns ${counts.join(", ")}.`);
  if (effect.moves?.topicsOpen > 0) lines.push(`${many(effect.moves.topicsOpen, "open topic")} of it go to others.`);
  if (effect.undeleteUntilMs) lines.push(`It can be brought back until ${time(effect.undeleteUntilMs)} (${duration(effect.undeleteUntilMs - now())}).`);
  lines.push(...warnings);
  return lines.length ? lines : ["Nothing that readers see changes."];
}
