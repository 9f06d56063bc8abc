// The messages of a topic, shown without consuming them.

import { Problem, ask, get, now, topicPath } from "../api.js";
import { HEX_PAGE, asText, bytes, count, duration, fromBase64, hex, idAfter, indent, many, position, time, timeOfId, visible } from "../format.js";
import { Component, ErrorPanel, FilterField, Guarded, TableFrame, copy, createRef, goQuery, html } from "../ui.js";
import { setAside } from "./mend.js";

const PAGE = 50;
const MOST_ROWS = 200;
// Bytes of each payload in the list; opening a message loads more.
const GLANCE_BYTES = 256;
const FIRST_BYTES = 64 * 1024;
// Long text is shown in pieces of about this many characters, of which the browser lays out only the visible ones.
const PIECE = 16 * 1024;
const BINS = 60;
const SLIDER_STEPS = 1000;
const STATES = {
  plain: ["plain", ""],
  committed: ["committed", "good"],
  open: ["open", "warn"],
  "rolled-back": ["rolled back", "muted"],
  invalid: ["invalid", "bad"],
  damaged: ["damaged", "bad"],
  "set-aside": ["set aside", "muted"],
  gone: ["expired", "muted"],
};
// States without a payload to open.
const UNREADABLE = ["damaged", "set-aside"];

export class Viewer extends Component {
  jump = createRef();

  constructor(props) {
    super(props);
    this.state = { rows: null, end: null, scanned: null, error: null, opened: null, bins: null };
  }

  componentDidMount() {
    this.props.mounted(this);
    this.show();
    this.measure();
  }

  componentDidUpdate(previous) {
    const [before, now] = [previous.route.query, this.props.route.query];
    if (["from", "to", "sort", "filter"].some((name) => before.get(name) !== now.get(name))) this.show();
    else if (before.get("open") !== now.get("open")) this.open();
  }

  componentWillUnmount() {
    this.gone = true;
    this.props.mounted(null);
  }

  get query() {
    return this.props.route.query;
  }

  path(...rest) {
    return topicPath(this.props.route.ns, this.props.route.topic, ...rest);
  }

  // Newest first, unless the user starts at the oldest or jumps.
  get newestFirst() {
    return this.query.get("sort") !== "asc";
  }

  get following() {
    return this.query.get("follow") === "1";
  }

  // New messages are added only at the top.
  get follows() {
    return this.following && this.newestFirst;
  }

  async fetch(bounds, limit = PAGE) {
    const filter = this.query.get("filter");
    const answer = await ask(this.path("messages"), { query: { limit, payload: "base64", longs: "string", payloadBytes: GLANCE_BYTES, filter, ...bounds } });
    const { headers } = answer;
    // A range that was set aside has no id of its own: the id at which it begins stands for it.
    for (const each of answer.data) each.id ??= each.from;
    return { rows: answer.data, more: headers.get("Plainsong-End") === "more", lastId: headers.get("Plainsong-Last-Id"), scanned: headers.get("Plainsong-Scanned") };
  }

  // Load the rows that the URL asks for.
  async show() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    this.showing = true;
    const [from, to] = [this.query.get("from"), this.query.get("to")];
    const descending = to ? true : from ? false : this.newestFirst;
    const { newestId } = this.props.stats;
    try {
      const found = await this.fetch(descending ? { order: "desc", to } : { from });
      if (turn !== this.turn || this.gone) return;
      this.missed = null;
      // A search from the newest message has covered everything up to newestId, with or without a match there.
      this.searchedTo = from || to || !this.query.get("filter") ? null : newestId;
      const rows = descending === this.newestFirst ? found.rows : [...found.rows].reverse();
      this.setState({ rows, more: found.more, lastId: found.lastId, descending, scanned: found.scanned, error: null });
      await this.open();
    } catch (error) {
      if (turn !== this.turn || this.gone) return;
      this.missed = error;
      this.failed(error);
    }
    if (turn !== this.turn) return;
    this.showing = false;
    const { outdated, missed } = this;
    this.outdated = null;
    if (outdated && !missed) await this.refresh(outdated).catch((error) => this.failed((this.refused = error)));
  }

  // For a refresh, which the page repeats if the daemon did not answer. Raises Away.
  async showAgain() {
    await this.show();
    if (!this.showing && this.missed && !(this.missed instanceof Problem)) throw this.missed;
  }

  failed(error) {
    if (!(error instanceof Problem)) return this.props.app.live.lost();
    if (this.gone) return;
    this.setState({ error });
    this.props.retry(error);
  }

  // Keep the shown rows in place, update their states, and add new rows if they are followed. Raises Away.
  async refresh(stats) {
    if (this.gone) return;
    // The load in progress may be older than `stats`: refresh after it.
    if (this.showing) {
      this.outdated = stats;
      return;
    }
    const { rows } = this.state;
    // The daemon was away or refused, and may answer now.
    if (this.missed || !rows) return this.showAgain();
    const filter = this.query.get("filter");
    if (!rows.length && !filter) {
      if (stats.messages > 0) await this.showAgain();
      return;
    }
    let next = rows.length ? await this.asTheyAre(rows) : rows;
    let news = null;
    if (this.follows) {
      news = await this.fetch({ from: this.newerThan(rows) }, 100);
      // Adding a page per refresh may be too slow to catch up: show the newest instead.
      if (news.more && !filter && !this.gone && !this.showing) return this.showAgain();
      next = [...news.rows.reverse(), ...next].slice(0, MOST_ROWS);
    }
    if (this.gone) return;
    if (this.showing || this.state.rows !== rows) return this.refresh(stats);
    if (filter && news?.lastId) this.searchedTo = news.lastId;
    // The error of an earlier attempt no longer applies.
    this.setState(({ error }) => ({ rows: next, error: error === this.refused ? null : error }));
    await this.open();
    if (stats.end !== this.measured) this.measure();
    if (news?.more) this.searchOn(stats);
  }

  // A search continues in steps, each shown as it ends; the page waits only for the first step.
  async searchOn(stats) {
    this.goOn = stats;
    if (this.searching) return;
    this.searching = true;
    try {
      while (this.goOn && !this.gone) {
        const next = this.goOn;
        this.goOn = null;
        await this.refresh(next);
      }
    } catch (error) {
      this.failed((this.refused = error));
    } finally {
      this.searching = false;
    }
  }

  // The first new row: after the newest shown row, and after everything searched without a match.
  newerThan(rows) {
    const last = [rows.length && this.ends(rows)[1], this.searchedTo].filter(Boolean).sort().at(-1);
    return last && idAfter(last);
  }

  // Return the shown rows in their current states.
  async asTheyAre(rows) {
    const [low, high] = this.ends(rows);
    const ids = rows.map(({ id }) => id).sort();
    const glance = { limit: MOST_ROWS, payload: "base64", longs: "string", payloadBytes: 1 };
    const now = new Map();
    // With a filter there may be many other rows between the shown ones: each page begins at the next shown row.
    for (let at = low; at; ) {
      const found = await get(this.path("messages"), { ...glance, from: at, to: idAfter(high) });
      for (const each of found) now.set((each.id ??= each.from), each);
      at = found.length === MOST_ROWS && ids.find((id) => id > found.at(-1).id);
    }
    // A range that was set aside replaces all its rows, in the place of the first of them.
    const aside = [...now.values()].filter((each) => each.state === "set-aside");
    const firsts = aside.map((each) => ids.find((id) => isIn(id, each)));
    return rows.flatMap((row) => {
      const which = aside.findIndex((each) => isIn(row.id, each));
      if (which >= 0) return row.id === firsts[which] ? [asItIs(row, aside[which])] : [];
      const seen = now.get(row.id);
      if (seen) return [asItIs(row, seen)];
      return [row.state !== "gone" ? { ...row, state: "gone" } : row];
    });
  }

  ends(rows) {
    const [first, last] = [rows[0].id, rows.at(-1).id];
    return first < last ? [first, last] : [last, first];
  }

  // Load the distribution over time: splits into parts of equal size, which are short where messages are dense.
  async measure() {
    if (this.measuring || Date.now() - (this.measuredAt ?? 0) < 30000) return;
    this.measuring = true;
    try {
      const { end, splits } = (await ask(this.path("offsets"), { method: "POST", body: { start: 0, splits: BINS } })).data;
      const { stats, now } = this.props;
      this.measured = end;
      this.measuredAt = Date.now();
      const start = stats.oldestId === null ? now : timeOfId(stats.oldestId);
      const newest = stats.newestId === null ? start : timeOfId(stats.newestId);
      this.setState({ start, bins: density([start, ...splits.map(timeOfId), newest + 1], now) });
    } catch (error) {
      if (!(error instanceof Problem)) return;
      this.measured = this.props.stats.end;
    } finally {
      this.measuring = false;
    }
  }

  // --- the open message ----------------------------------------------------------------------------

  async open() {
    const id = this.query.get("open");
    if (!id) return this.state.opened && this.setState({ opened: null });
    if (this.state.opened?.id === id) return;
    try {
      const [message] = await get(this.path("messages"), { from: id, to: idAfter(id), limit: 1, payload: "base64", longs: "string", payloadBytes: FIRST_BYTES });
      if (this.gone || this.query.get("open") !== id || this.state.opened?.id === id) return;
      if (!message) return this.setState({ opened: { id, missing: true }, error: null });
      const data = message.payload == null ? null : fromBase64(message.payload.base64);
      this.setState({ opened: { id, message, data, cut: message.truncated === true }, error: null });
    } catch (error) {
      if (error instanceof Problem && !this.gone && this.query.get("open") === id) this.setState({ error });
    }
  }

  async whole(id) {
    try {
      const { data } = await ask(this.path("messages", id), { raw: true });
      this.setState(({ opened }) => (opened?.id === id ? { opened: { ...opened, data, cut: false } } : null));
      return data;
    } catch (error) {
      if (error instanceof Problem) this.setState({ error });
      return null;
    }
  }

  async download({ id, data, cut }) {
    const content = cut ? await this.whole(id) : data;
    if (!content) return;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
    link.download = `${this.props.route.topic}-${id}.bin`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  curl(id) {
    const secret = this.props.app.state.who?.via === "token" ? ` -H "Authorization: Bearer $PLAINSONG_TOKEN"` : "";
    return `curl -H 'Accept: application/octet-stream'${secret} '${location.origin}${this.path("messages", id)}'`;
  }

  python(id) {
    const { ns, topic } = this.props.route;
    const named = this.props.app.state.who?.via === "token";
    const [above, secret] = named ? ["import os\n\n", `, token=os.environ["PLAINSONG_TOKEN"]`] : ["", ""];
    return `${above}from plainsong import Client\n\nwith Client("${location.origin}", namespace="${ns}"${secret}) as client:\n    [message] = client.admin.messages("${topic}", "${id}", limit=1)\n    print(message.payload)\n`;
  }

  setAside(id) {
    const { app, route } = this.props;
    const done = async () => {
      await this.show();
      app.refresh();
    };
    setAside(app, route.ns, route.topic, id, id, done).catch((error) => this.setState({ error }));
  }

  toggle(id) {
    goQuery({ open: this.query.get("open") === id ? null : id }, { replace: true });
  }

  // --- navigation ----------------------------------------------------------------------------------

  submitJump() {
    const field = this.jump.current;
    const at = position(field.value, now());
    if (at === null) {
      field.setCustomValidity("an id of 40 hex digits, a date and time, or how long ago: 15m, 2h, 1d");
      field.reportValidity();
      return;
    }
    goQuery({ from: at, to: null, sort: "asc", follow: null });
  }

  // A search continues where it stopped, which may be far beyond the last match.
  older() {
    const { rows, descending, lastId } = this.state;
    goQuery({ to: descending && lastId ? lastId : this.ends(rows)[0], from: null, follow: null });
  }

  newer() {
    const { rows, descending, lastId } = this.state;
    goQuery({ from: idAfter(!descending && lastId ? lastId : this.ends(rows)[1]), to: null, follow: null });
  }

  goesOn(down) {
    const { rows, more, descending, lastId } = this.state;
    return rows?.length > 0 || Boolean(rows && more && lastId && descending === down);
  }

  render({ stats, now }, { rows, error, opened, bins, start, scanned, more }) {
    const view = this.query.get("view") ?? "text";
    const none = !rows?.length;
    const oldest = start ?? (stats.oldestId === null ? now : timeOfId(stats.oldestId));
    const filtered = this.query.get("filter");
    return html`<section aria-labelledby="messages-title" class="viewer">
      <h2 id="messages-title">Messages</h2>
      <div class="toolbar">
        <form onSubmit=${(event) => (event.preventDefault(), this.submitJump())}>
          <label><span class="offscreen">Jump to an id or a time</span>
            <input ref=${this.jump} data-testid="jump" placeholder="id, time, or 15m ago" spellcheck="false" onInput=${(event) => event.currentTarget.setCustomValidity("")} /></label>
        </form>
        <form onSubmit=${(event) => (event.preventDefault(), goQuery({ filter: event.currentTarget.elements[0].value, open: null }))}>
          <label><span class="offscreen">Only messages that contain</span>
            <${FilterField} data-testid="message-filter" shown=${filtered} placeholder="contains …  ( / )" /></label>
        </form>
        <span class="group" role="group" aria-label="Go to">
          <button type="button" data-testid="from-oldest" onClick=${() => goQuery({ from: null, to: null, sort: "asc", follow: null })}>Oldest</button>
          <button type="button" data-testid="from-newest" onClick=${() => goQuery({ from: null, to: null, sort: null })}>Newest</button>
          <button type="button" data-testid="older" disabled=${!this.goesOn(true)} onClick=${() => this.older()}>Older</button>
          <button type="button" data-testid="newer" disabled=${!this.goesOn(false)} onClick=${() => this.newer()}>Newer</button>
          <button type="button" data-testid="follow" aria-pressed=${this.following} onClick=${() => goQuery(this.following ? { follow: null } : { follow: 1, from: null, to: null, sort: null })}>Follow</button>
        </span>
        <span class="group" role="group" aria-label="Show payloads as">
          ${["text", "json", "hex"].map((each) => html`<button type="button" data-testid=${`view-${each}`} aria-pressed=${view === each} onClick=${() => goQuery({ view: each === "text" ? null : each }, { replace: true })}>${each}</button>`)}
        </span>
      </div>
      <${Timeline} bins=${bins} start=${oldest} end=${now} rows=${rows} onMove=${(at) => goQuery({ from: String(at), to: null, sort: "asc", follow: null })} />
      <${ErrorPanel} error=${error} />
      ${filtered && html`<p class="muted">Only messages that contain <code>${filtered}</code>${scanned ? ` · ${count(Number(scanned))} searched${more ? "; Older or Newer continues the search" : ""}` : ""}. <button type="button" class="plain" onClick=${() => goQuery({ filter: null })}>Show all</button></p>`}
      ${rows &&
      (none
        ? html`<p class="muted" data-testid="messages-empty">${filtered || this.query.get("from") || this.query.get("to") ? "No messages here." : "The topic is empty."}</p>`
        : html`<${TableFrame} label="Messages"><table class="messages">
            <caption class="offscreen">Messages, ${this.newestFirst ? "newest" : "oldest"} first</caption>
            <thead><tr>
              <th scope="col" aria-sort=${this.newestFirst ? "descending" : "ascending"}>Published<span aria-hidden="true">${this.newestFirst ? " ↓" : " ↑"}</span></th>
              <th scope="col">State</th><th scope="col" class="number">Size</th><th scope="col" class="wide">Payload</th></tr></thead>
            ${rows.slice(0, MOST_ROWS).map((row) => html`<${MessageRow} key=${row.id} row=${row} view=${view} viewer=${this} opened=${opened?.id === row.id ? opened : null} />`)}
          </table></${TableFrame}>`)}
    </section>`;
  }
}

const isIn = (id, { from, to }) => from <= id && id <= to;

// Return a row in its current state. It keeps its payload, unless the old or the new state has none.
function asItIs(row, seen) {
  if (seen.state === row.state && seen.to === row.to) return row;
  return UNREADABLE.includes(row.state) || UNREADABLE.includes(seen.state) ? seen : { ...row, state: seen.state };
}

class MessageRow extends Component {
  shouldComponentUpdate({ row, view, opened }) {
    return row !== this.props.row || view !== this.props.view || opened !== this.props.opened;
  }

  render({ row, view, viewer, opened }) {
    const [word, color] = STATES[row.state] ?? [row.state, ""];
    const open = () => viewer.toggle(row.id);
    const { app, route } = viewer.props;
    const whole = UNREADABLE.includes(row.state) ? null : opened;
    return html`<tbody data-testid="message-row" data-id=${row.id} data-state=${row.state} class=${opened ? "open" : ""}>
      <tr tabindex="-1" data-row onClick=${(event) => getSelection().isCollapsed && !event.target.closest("button,a") && open()} onKeyDown=${(event) => event.key === "Enter" && event.target === event.currentTarget && open()}>
        <td><button type="button" class="plain stamp" aria-expanded=${Boolean(opened)} title=${row.id} onClick=${open}>${time(row.publishTimeMs ?? timeOfId(row.id), true)}</button></td>
        <td><span class=${`state ${color}`} data-testid="message-state">${word}</span></td>
        <td class="number" data-testid="message-size" title=${row.size == null ? null : `${count(row.size)} bytes`}>${bytes(row.size)}</td>
        <td class="wide"><code class="glance" data-testid=${whole ? null : "message-payload"}>${row.detail ?? glance(row)}</code>
          ${row.state === "damaged" && html` <${Guarded} app=${app} verb="admin" on=${`${route.ns}:${route.topic}`} data-testid="set-aside" onClick=${() => viewer.setAside(row.id)}>Set aside …</${Guarded}>`}</td>
      </tr>
      ${whole && !whole.missing && html`<tr class="detail"><td colspan="4"><${Detail} opened=${whole} view=${view} viewer=${viewer} /></td></tr>`}
    </tbody>`;
  }
}

// The beginning of a payload, on one line.
function glance(row) {
  if (row.state === "set-aside") return `${row.rows == null ? "rows that could not be counted" : many(row.rows, "row")}, up to ${time(timeOfId(row.to), true)}: readers skip them`;
  if (row.payload == null) return "not visible to you";
  const data = fromBase64(row.payload.base64).subarray(0, GLANCE_BYTES);
  const text = asText(data, true);
  return text === null ? hex(data, 0, 32).slice(10, 58).trim() : visible(text);
}

function Detail({ opened, view, viewer }) {
  const { id, message, data, cut } = opened;
  const { app } = viewer.props;
  const attributes = Object.entries(message.attributes ?? {});
  const facts = [
    ["Id", html`<code class="id">${id}</code>`],
    message.writePointer && ["Transaction", html`<a href=${`/console/transactions?open=${String(message.writePointer).replace("-", "")}`}><code>${String(message.writePointer)}</code></a>`],
    message.producer && ["Producer", `${message.producer}${message.sequenceId == null ? "" : `, sequence id ${message.sequenceId}`}`],
    message.batch && ["Batch", `${message.batch.index + 1} of ${message.batch.count}`],
    message.expiresMs && ["Expires", `${time(message.expiresMs)} (in ${duration(message.expiresMs - now())})`],
  ].filter(Boolean);
  return html`<div class="payload">
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
      ${attributes.length > 0 && html`<div><dt>Attributes</dt><dd><dl class="attributes" data-testid="message-attributes">${attributes.map(([name, value]) => html`<div><dt>${visible(name)}</dt><dd>${visible(value)}</dd></div>`)}</dl></dd></div>`}
    </dl>
    <p class="buttons start">
      <button type="button" data-testid="copy-id" onClick=${() => copy(app, id, "Id")}>Copy id</button>
      <button type="button" data-testid="copy-curl" title=${viewer.curl(id)} onClick=${() => copy(app, viewer.curl(id), "curl command")}>Copy as curl</button>
      <button type="button" data-testid="copy-python" title=${viewer.python(id)} onClick=${() => copy(app, viewer.python(id), "Python program")}>Copy as Python</button>
      ${data && html`<button type="button" data-testid="message-download" onClick=${() => viewer.download(opened)}>Download</button>`}
      ${cut && html`<button type="button" data-testid="message-whole" onClick=${() => viewer.whole(id)}>Show all ${bytes(message.size)}</button>`}
    </p>
    ${data ? html`<${Payload} key=${`${id}-${data.length}`} data=${data} cut=${cut} size=${message.size} view=${view} />` : html`<p class="muted">The payload needs the verb poll.</p>`}
  </div>`;
}

// A payload: its exact text, indented JSON, or bytes.
class Payload extends Component {
  constructor(props) {
    super(props);
    this.state = { at: 0 };
  }

  shouldComponentUpdate({ view }, { at }) {
    return view !== this.props.view || at !== this.state.at;
  }

  render({ data, cut, size, view }, { at }) {
    const text = view === "hex" ? null : asText(data, cut);
    if (text === null) {
      const to = Math.min(data.length, at + HEX_PAGE);
      return html`${view !== "hex" && html`<p class="muted">Not text: shown as bytes.</p>`}
        ${data.length > HEX_PAGE &&
        html`<p class="pager"><button type="button" data-testid="hex-previous" disabled=${at === 0} onClick=${() => this.setState({ at: at - HEX_PAGE })}>Previous</button>
          <button type="button" data-testid="hex-next" disabled=${to >= data.length} onClick=${() => this.setState({ at: at + HEX_PAGE })}>Next</button>
          <span>bytes ${count(at)}–${count(to - 1)} of ${count(size)}</span></p>`}
        <pre class="hex" tabindex="0" data-testid="message-payload">${hex(data, at, to)}</pre>`;
    }
    const formatted = view === "json" ? indent(text, cut) : text;
    return html`${formatted === null && html`<p class="muted">Not JSON: shown as text.</p>`}
      <pre tabindex="0" data-testid="message-payload">${pieces(visible(formatted ?? text))}</pre>
      ${cut && html`<p class="muted">The first ${bytes(data.length)} of ${bytes(size)}.</p>`}`;
  }
}

// Split long text into pieces, at line ends if possible, so that the browser need not lay out all of it.
function pieces(text) {
  if (text.length <= FIRST_BYTES) return text;
  const found = [];
  for (let at = 0; at < text.length; ) {
    let end = Math.min(text.length, at + PIECE);
    if (end < text.length) {
      const line = text.lastIndexOf("\n", end);
      if (line > at) end = line + 1;
      else if (/[\uD800-\uDBFF]/.test(text[end - 1])) end += 1;
    }
    found.push(html`<span class="piece">${text.slice(at, end)}</span>`);
    at = end;
  }
  return found;
}

// --- time -------------------------------------------------------------------------------------------

// Spread parts of equal size between `edges` over bins of equal duration that end at `now`.
function density(edges, now) {
  const start = edges[0];
  const end = Math.max(now, edges.at(-1));
  const bins = new Array(BINS).fill(0);
  const width = (end - start) / BINS || 1;
  for (let part = 0; part + 1 < edges.length; part += 1) {
    const [from, to] = [edges[part], Math.max(edges[part + 1], edges[part] + 1)];
    const [first, last] = [Math.floor((from - start) / width), Math.min(BINS - 1, Math.floor((to - start) / width))];
    for (let bin = Math.max(0, first); bin <= last; bin += 1) {
      const overlap = Math.min(to, start + (bin + 1) * width) - Math.max(from, start + bin * width);
      bins[bin] += Math.max(0, overlap) / (to - from);
    }
  }
  return bins;
}

class Timeline extends Component {
  render({ bins, start, end, rows, onMove }) {
    const span = Math.max(1, end - start);
    const shown = rows?.length ? rows[0].publishTimeMs ?? timeOfId(rows[0].id) : end;
    const most = bins ? Math.max(...bins, 0.001) : 1;
    const at = Math.round((SLIDER_STEPS * Math.min(1, Math.max(0, (shown - start) / span))));
    return html`<div class="timeline">
      <svg viewBox=${`0 0 ${BINS} 20`} preserveAspectRatio="none" aria-hidden="true">
        ${bins?.map((value, i) => value > 0 && html`<rect x=${i + 0.1} width="0.8" y=${20 - (20 * value) / most} height=${(20 * value) / most} />`)}
      </svg>
      <input type="range" data-testid="slider" aria-label="Position in time" aria-valuetext=${time(shown)} min="0" max=${SLIDER_STEPS} value=${at}
        onChange=${(event) => onMove(Math.round(start + (span * event.currentTarget.value) / SLIDER_STEPS))} />
      <div class="ends"><span>${time(start)}</span><span>now</span></div>
    </div>`;
  }
}
