// A topic: its figures, the transaction that holds its readers, its messages, readers and properties.

import { Away, Problem, ask, get, optional, now, pathOf, topicPath } from "../api.js";
import { bytes, count, duration, many, rate, time } from "../format.js";
import { carryOut, effectLines, preview, said } from "../preview.js";
import { ErrorPanel, Guarded, Option, Page, Row, Spark, Stat, TableFrame, go, html, nextPage, previousPage, producersUrl, transactionUrl } from "../ui.js";
import { Component } from "../vendor/preact.mjs";
import { Attention } from "./attention.js";
import { undelete } from "./mend.js";
import { Viewer } from "./viewer.js";

// Readers per page. The daemon counts messages for each of them.
const READERS = 25;
const SLOW_MS = 100;
// Pause between two loads while messages are followed.
const FOLLOW_PAUSE_MS = 400;
// Readers and producers to name before a deletion.
const MOST_CONCERNED = 20;
const SETTINGS = ["ttl", "max_bytes", "transactional", "deduplication"];

export class Topic extends Page {
  title = `${this.props.route.ns}:${this.props.route.topic}`;

  get name() {
    return this.title;
  }

  path(...rest) {
    return topicPath(this.props.route.ns, this.props.route.topic, ...rest);
  }

  interest() {
    return { topics: this.name, kinds: "topics,transactions" };
  }

  onEvent(name, data) {
    if (name === "topics") this.setState({ row: data.find((each) => `${each.namespace}:${each.name}` === this.name) ?? null });
    super.onEvent();
  }

  // While following, a new message appears within a second.
  get pauseMs() {
    return this.query.get("follow") === "1" ? FOLLOW_PAUSE_MS : super.pauseMs;
  }

  moved(before) {
    if (this.query.get("readers") !== before.get("readers")) this.lag(true).catch((error) => this.failed(error));
  }

  async load() {
    const shown = await this.shown();
    if (!shown) return;
    const [stats, open, history, attention] = await Promise.all([get(this.path("stats")), this.openTransactions(), optional(get(this.path("history"))), optional(get("/v1/attention"))]);
    this.setState({ properties: shown.data.properties, deduplication: shown.data.deduplication, etag: shown.headers.get("ETag"), stats, open, history, attention: attention?.filter((each) => this.concerns(each)), deleted: null, at: now() });
    this.lag().catch((error) => this.failed(error));
    await this.viewer?.refresh(stats);
  }

  // True if a problem concerns this topic, except for the transaction that the banner names.
  concerns({ kind, subject }) {
    return kind !== "held-reader" && (subject === this.name || subject.startsWith(`${this.name}/`));
  }

  // Load the topic; null if it was deleted and the list of deleted topics has it.
  async shown() {
    try {
      return await ask(this.path());
    } catch (error) {
      if (error.code !== "topic_not_found") throw error;
      const gone = await optional(get(pathOf("namespaces", this.props.route.ns, "topics"), { deleted: true }));
      const deleted = gone?.find((each) => each.name === this.props.route.topic);
      if (!deleted) throw error;
      this.setState({ deleted, stats: null, properties: null, readers: null, at: now() });
      return null;
    }
  }

  // Load the open transactions with messages here, oldest first; null if the daemon refused.
  async openTransactions() {
    try {
      const found = await get("/v1/transactions", { state: "in_progress", limit: 1000, longs: "string" });
      return found.filter((each) => each.topics?.includes(this.name));
    } catch (error) {
      if (error instanceof Problem && error.status !== 401) return null;
      throw error;
    }
  }

  // Load a page of readers and their lag, ordered by name. After a slow count, wait ten times as long as it took.
  async lag(wanted = false) {
    const rest = (this.countAgain ?? 0) - performance.now();
    if (!wanted && (this.counting || rest > 0)) {
      this.countSoon ??= setTimeout(() => {
        this.countSoon = null;
        // A hidden page requests nothing, and loads everything when it is visible again.
        if (!this.gone && this.props.app.live.word === "live") this.lag().catch((error) => this.failed(error));
      }, Math.max(rest, SLOW_MS));
      return;
    }
    const after = this.query.get("readers");
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const began = performance.now();
    this.counting = true;
    try {
      const readers = await optional(get(this.path("lag"), { limit: READERS, after }));
      if (!this.gone && turn === this.turn) this.setState({ readers });
    } finally {
      const took = performance.now() - began;
      if (turn === this.turn) this.counting = false;
      this.countAgain = took > SLOW_MS ? began + 11 * took : 0;
    }
  }

  // Name the readers, producers and transactions that a deletion affects, as far as the user may see them.
  async concerned({ effect }) {
    const [readers, producers] = await Promise.all([
      effect.readers ? optional(get(this.path("lag"), { limit: MOST_CONCERNED })) : null,
      effect.producers ? optional(get(this.path("producers"), { limit: MOST_CONCERNED })) : null,
    ]);
    return {
      readers: readers?.readers.filter((each) => each.kind === "kept").map((each) => each.name),
      producers: producers?.producers.map((each) => each.producer),
      openTransactions: this.state.open?.map((each) => each.clientId || each.id),
    };
  }

  async remove() {
    const asked = await preview(this.path(), "DELETE");
    const who = await this.concerned(asked);
    this.props.app.confirm({
      title: `Delete ${this.name}?`,
      lines: effectLines(asked, who),
      name: this.props.route.topic,
      action: "Delete",
      run: async () => {
        const done = await carryOut(this.path(), "DELETE", { etag: asked.etag });
        this.props.app.say(said(`${this.name} was deleted`, done));
        go("/console");
      },
    });
  }

  undelete() {
    return undelete(this.props.app, this.props.route.ns, this.props.route.topic, () => this.refresh());
  }

  attempt(action) {
    return () => action.call(this).catch((error) => this.refused(error));
  }

  render({ app, route }, { error, properties, deduplication, etag, stats, readers, open, history, attention, row, deleted, at }) {
    const { when } = this;
    const hidden = row?.hiddenMessages ?? Math.max(0, ...(open ?? []).map((each) => Number(each.hiddenMessages) || 0));
    return html`<div class="head">
        <h1 tabindex="-1" data-testid="topic-name">${this.name}</h1>
        ${stats &&
        html`<p class="links"><a href="#readers-title">Readers${readers ? ` (${count(readers.total)})` : ""}</a> <a href=${producersUrl(route.ns, route.topic)}>Producers (${count(stats.producers)})</a> <a href="#properties-title">Properties</a></p>`}
      </div>
      <${ErrorPanel} error=${error} />
      ${deleted && html`<${Deleted} app=${app} name=${this.name} deleted=${deleted} now=${when} undelete=${this.attempt(this.undelete)} />`}
      ${stats &&
      html`<${Held} open=${open} hidden=${hidden} stats=${stats} now=${when} />
        <dl class="stats">
          <${Stat} id="stat-messages" label="Messages" value=${count(stats.messages, stats.estimated)} title=${stats.estimated ? "an upper bound" : null} />
          <${Stat} id="stat-bytes" label="Size" value=${bytes(stats.bytes, stats.estimated)} title=${`${count(stats.bytes)} bytes`} />
          <${Stat} id="stat-oldest" label="Oldest" value=${stats.oldestAgeMs == null ? "–" : `${duration(stats.oldestAgeMs + when - at)} ago`} title=${stats.oldestAgeMs == null ? null : time(at - stats.oldestAgeMs)} />
          <${Stat} id="stat-in" label="In per second" value=${rate(stats.publishPerSecond)} />
          <${Stat} id="stat-out" label="Out per second" value=${rate(stats.pollPerSecond)} />
          <${Stat} id="stat-parked" label="Waiting polls" value=${count(stats.parkedPolls)} />
          <${Stat} id="stat-generation" label="Generation" value=${stats.generation} title=${`created ${time(stats.createdMs)}`} />
          ${stats.owner && html`<${Stat} id="stat-owner" label="Owner" value=${stats.owner} />`}
          ${history && html`<div class="stat"><dt>Last hour</dt><dd><${Spark} values=${history.published} label="messages published in each of the last 60 minutes" /></dd></div>`}
        </dl>`}
      <${Attention} items=${stats && attention} now=${when} about=${this.name} />
      ${stats && html`<${Viewer} mounted=${(viewer) => (this.viewer = viewer)} retry=${(error) => this.retry(error)} app=${app} route=${route} stats=${stats} now=${at} />`}
      ${stats && html`<${Publish} app=${app} topic=${this.name} path=${this.path("publish")} done=${() => this.refresh()} />`}
      ${stats && readers && html`<${Readers} lag=${readers} after=${this.query.get("readers")} now=${when} />`}
      ${properties && html`<${Properties} app=${app} topic=${this.name} path=${this.path("properties")} properties=${properties} deduplication=${deduplication} etag=${etag} saved=${() => this.refresh()} />`}
      ${properties &&
      html`<section aria-labelledby="danger"><h2 id="danger">Delete</h2>
        <p class="muted">Hides the topic and its messages from all readers at once.</p>
        <${Guarded} app=${app} verb="admin" on=${this.name} class="danger" data-testid="topic-delete" onClick=${this.attempt(this.remove)}>Delete this topic …</${Guarded}>
      </section>`}`;
  }
}

// A deleted topic: its size, and until when it can be restored.
function Deleted({ app, name, deleted, now, undelete }) {
  const kept = deleted.state === "kept";
  return html`<div class="banner" data-testid="deleted-banner">
    <div><strong>This topic was deleted</strong> ${duration(now - deleted.deletedMs)} ago (${time(deleted.deletedMs)}), with ${many(deleted.messages, "message")} (${bytes(deleted.bytes)}).
      ${kept ? ` It can be restored for ${duration(deleted.undeleteUntilMs - now)}.` : " Its messages are being removed: it cannot be restored."}</div>
    ${kept && html`<${Guarded} app=${app} verb="admin" on=${name} data-testid="topic-undelete" onClick=${undelete}>Undelete …</${Guarded}>`}
  </div>`;
}

// The transaction that holds committed readers, its age, and how many messages it hides.
function Held({ open, hidden, stats, now }) {
  const first = open?.find((each) => Number(each.hiddenMessages) > 0) ?? open?.[0];
  if (!first && !(stats.openTransactions > 0 && hidden > 0)) return null;
  if (!first) {
    return html`<div class="banner" data-testid="held-banner"><strong>Committed readers are held</strong> by a transaction that this daemon does not decide. ${many(hidden, "message")} hidden.</div>`;
  }
  return html`<div class="banner" data-testid="held-banner">
    <div><strong>Committed readers are held</strong> by a transaction of ${first.clientId ? html`<strong>${first.clientId}</strong>` : "an unnamed client"}, open for ${duration(now - first.startedMs)} (since ${time(first.startedMs)}).
      ${hidden > 0 ? ` ${many(hidden, "message")} hidden.` : " Nothing is hidden yet."}
      ${open.length > 1 ? ` ${many(open.length - 1, "more open transaction")} after it.` : ""}
      ${first.expiresMs ? ` It times out in ${duration(first.expiresMs - now)}.` : ""}</div>
    <a class="button" data-testid="held-open" href=${transactionUrl(first.id)}>Open the transaction</a>
  </div>`;
}

// Publishes one text message, to try something out.
class Publish extends Component {
  constructor() {
    super();
    this.state = { text: "" };
  }

  ask() {
    const { app, topic, path, done } = this.props;
    const { text } = this.state;
    app.confirm({
      title: `Publish to ${topic}?`,
      lines: [`One message of ${bytes(new TextEncoder().encode(text).length)}. Every reader of the topic gets it, and it cannot be undone.`],
      action: "Publish",
      harmless: true,
      run: async () => {
        try {
          await ask(path, { method: "POST", body: { messages: [text] } });
        } catch (error) {
          if (error instanceof Away) error.message += ": the message may have been published. Check the newest messages before you publish it again.";
          throw error;
        }
        this.setState({ text: "" });
        app.say(`Published one message to ${topic}`);
        await done();
      },
    });
  }

  render({ app, topic }, { text }) {
    return html`<section aria-labelledby="publish-title"><h2 id="publish-title">Publish</h2>
      <label>Message<textarea data-testid="publish-text" rows="3" spellcheck="false" value=${text} onInput=${(event) => this.setState({ text: event.currentTarget.value })}></textarea></label>
      <p class="buttons start"><${Guarded} app=${app} verb="publish" on=${topic} data-testid="publish" disabled=${!text} onClick=${() => this.ask()}>Publish …</${Guarded}></p>
    </section>`;
  }
}

// Readers with a saved position, and those that send their name when they poll.
function Readers({ lag, after, now }) {
  const { readers, total, next } = lag;
  if (!total) {
    return html`<section aria-labelledby="readers-title"><h2 id="readers-title">Readers</h2>
      <p class="muted" data-testid="readers">No reader has a saved position here, and none has sent its name recently. A poll with the header <code>Plainsong-Reader</code> is listed for an hour.</p></section>`;
  }
  return html`<section aria-labelledby="readers-title"><div class="head"><h2 id="readers-title">Readers</h2><span class="muted" data-testid="readers-total">${count(total)}</span></div>
    <${TableFrame} label="Readers"><table data-testid="readers">
      <caption class="offscreen">Readers, their lag and when they were last seen</caption>
      <thead><tr><th scope="col">Name</th><th scope="col" class="number">Unread</th><th scope="col" class="number">Hidden</th><th scope="col" class="number">Expired unread</th><th scope="col" class="number">Lag</th><th scope="col">Last seen</th><th scope="col">Position</th></tr></thead>
      <tbody>${readers.map((each) => html`<${Row} key=${each.name} data-testid="reader-row" data-reader=${each.name} data-kind=${each.kind}>
          <th scope="row">${each.name}</th>
          <td class="number">${count(each.visible, each.estimated)}</td>
          <td class=${`number ${each.hidden > 0 ? "warn" : ""}`}>${count(each.hidden, each.estimated)}</td>
          <td class=${`number ${each.expiredUnread > 0 ? "bad" : ""}`}>${count(each.expiredUnread)}</td>
          <td class="number" title="age of the oldest unread message">${each.lagMs ? duration(each.lagMs) : "–"}</td>
          <td title=${time(each.lastSeenMs)}>${duration(now - each.lastSeenMs)} ago${each.kind === "named" ? `, by ${each.by}` : ""}</td>
          <td><code class="id">${each.position}</code></td>
        </${Row}>`)}</tbody>
    </table></${TableFrame}>
    ${(after || next) &&
    html`<p class="pager"><button type="button" data-testid="readers-previous" disabled=${!after} onClick=${() => previousPage("readers")}>Previous</button>
      <button type="button" data-testid="readers-next" disabled=${!next} onClick=${() => nextPage("readers", next)}>Next</button></p>`}
  </section>`;
}

// Properties. A change needs a preview, and is refused if they have changed since.
class Properties extends Component {
  constructor(props) {
    super(props);
    this.state = { edited: {}, asked: null, error: null };
  }

  edit(name, value) {
    this.setState(({ edited }) => ({ edited: { ...edited, [name]: value }, asked: null, error: null }));
  }

  body() {
    const found = {};
    for (const name of SETTINGS) {
      const value = this.value(name);
      if (value !== "" && value != null) found[name] = /^\d+$/.test(value) ? Number(value) : value;
    }
    return found;
  }

  value(name) {
    return this.state.edited[name] ?? this.props.properties[name] ?? "";
  }

  changed() {
    return SETTINGS.some((name) => name in this.state.edited && this.state.edited[name] !== (this.props.properties[name] ?? ""));
  }

  async preview() {
    const { edited } = this.state;
    // Drop the answer if the user has edited since the request.
    const told = (news) => this.setState((state) => (state.edited === edited ? news : null));
    try {
      const body = this.body();
      const { etag } = this.props;
      const asked = await preview(this.props.path, "PUT", body);
      told({ asked: { ...asked, etag: asked.etag ?? etag, body }, error: null });
    } catch (error) {
      told({ error, asked: null });
    }
  }

  async apply() {
    const { asked } = this.state;
    try {
      const done = await carryOut(this.props.path, "PUT", { body: asked.body, etag: asked.etag });
      this.setState({ edited: {}, asked: null });
      this.props.app.say(said("The properties were changed", done));
      this.props.saved();
    } catch (error) {
      this.setState({ error, asked: null });
    }
  }

  field(name, label, note) {
    return html`<label>${label}<input inputmode="numeric" data-testid=${`property-${name}`} value=${this.value(name)} onInput=${(event) => this.edit(name, event.currentTarget.value.trim())} /><span class="muted">${note}</span></label>`;
  }

  choice(name, label, values, note) {
    const now = this.value(name);
    return html`<label>${label}<select data-testid=${`property-${name}`} value=${now} onChange=${(event) => this.edit(name, event.currentTarget.value)}>
      ${values.map((each) => html`<${Option} value=${each} chosen=${now} />`)}</select><span class="muted">${note}</span></label>`;
  }

  render({ app, topic, deduplication }, { asked, error }) {
    const ttl = Number(this.value("ttl"));
    const most = Number(this.value("max_bytes"));
    return html`<section aria-labelledby="properties-title"><h2 id="properties-title">Properties</h2>
      <form class="fields" onSubmit=${(event) => event.preventDefault()}>
        ${this.field("ttl", "ttl, seconds", ttl > 0 ? duration(ttl * 1000) : "the daemon's default")}
        ${this.field("max_bytes", "max_bytes", most > 0 ? bytes(most) : "no limit")}
        ${this.choice("transactional", "transactional", ["optional", "required", "disabled"], "whether publishes need a write pointer")}
        ${this.choice("deduplication", "deduplication", ["inherit", "enabled", "disabled"], deduplication ? `${deduplication.enabled ? "on" : "off"}, as the ${deduplication.level} says` : "")}
      </form>
      <p class="buttons start">
        <${Guarded} app=${app} verb="admin" on=${topic} data-testid="preview" disabled=${!this.changed()} onClick=${() => this.preview()}>Preview the change</${Guarded}>
        ${this.changed() && html`<button type="button" onClick=${() => this.setState({ edited: {}, asked: null, error: null })}>Reset</button>`}
      </p>
      <${ErrorPanel} error=${error} />
      ${asked &&
      html`<div class="preview">
        <div data-testid="preview-effect" data-hides=${asked.effect?.hides?.messages ?? 0}>
          ${asked.changed?.length ? html`<p><strong>Changes ${asked.changed.map((each) => `${each} from ${asked.before?.[each] ?? "none"} to ${asked.after?.[each] ?? "none"}`).join(", ")}.</strong></p>` : null}
          ${effectLines(asked).map((line) => html`<p>${line}</p>`)}
        </div>
        <p class="buttons start"><button type="button" class="danger" data-testid="apply" onClick=${() => this.apply()}>Apply</button></p>
      </div>`}
    </section>`;
  }
}
