// A topic: how it is doing, who holds it up, what it is set to, what is in it, who reads it.

import { Problem, ask, get, now, topicPath } from "../api.js";
import { bytes, count, duration, many, rate, time } from "../format.js";
import { preview } from "../preview.js";
import { ErrorPanel, Guarded, Option, Page, Pager, Row, Spark, Stat, TableFrame, effectLines, go, html, producersUrl, transactionUrl } from "../ui.js";
import { Component } from "../vendor/preact.mjs";
import { Viewer } from "./viewer.js";

// Positions of kept readers are measured one by one, so not of all at once.
const MEASURED_READERS = 25;
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

  moved(before) {
    if (this.query.get("readers") !== before.get("readers")) super.moved();
  }

  async load() {
    const shown = await ask(this.path());
    const [stats, readers, open, history] = await Promise.all([
      get(this.path("stats")),
      get(this.path("readers")),
      this.openTransactions(),
      optional(get(this.path("history"))),
    ]);
    this.setState({ properties: shown.data.properties, deduplication: shown.data.deduplication, etag: shown.headers.get("ETag"), stats, readers, open, history, at: now() });
    this.measure(readers);
    await this.viewer?.refresh(stats);
  }

  // Transactions that are open and have messages here, oldest first; null where nobody can say.
  async openTransactions() {
    try {
      const found = await get("/v1/transactions", { state: "in_progress", limit: 1000, longs: "string" });
      return found.filter((each) => each.topics?.includes(this.name));
    } catch (error) {
      if (error instanceof Problem && error.status !== 401) return null;
      throw error;
    }
  }

  // What each reader has before it.
  async measure(readers) {
    const from = Number(this.query.get("readers") ?? 0);
    const measured = { ...this.state.measured };
    for (const reader of readers.slice(from, from + MEASURED_READERS)) {
      if (this.gone) return;
      const stats = await optional(get(this.path("stats"), { reader: reader.position }));
      if (stats) measured[reader.name] = stats.reader;
    }
    this.setState({ measured });
  }

  async remove() {
    const asked = await preview(this.props.app, "DELETE", this.path());
    this.props.app.confirm({
      title: `Delete ${this.name}?`,
      lines: effectLines(asked),
      name: this.props.route.topic,
      action: "Delete",
      run: async () => {
        await ask(this.path(), { method: "DELETE", headers: asked.etag ? { "If-Match": asked.etag } : {} });
        this.props.app.say(`${this.name} was deleted`);
        go("/console");
      },
    });
  }

  attempt(action) {
    return () => action.call(this).catch((error) => this.failed(error));
  }

  render({ app, route }, { error, properties, deduplication, etag, stats, readers, measured, open, history, row, at }) {
    const hidden = row?.hiddenMessages ?? Math.max(0, ...(open ?? []).map((each) => Number(each.hiddenMessages) || 0));
    return html`<div class="head">
        <h1 tabindex="-1" data-testid="topic-name">${this.name}</h1>
        <p class="links"><a href=${producersUrl(route.ns, route.topic)}>Producers${stats ? ` (${count(stats.producers)})` : ""}</a></p>
      </div>
      <${ErrorPanel} error=${error} />
      ${stats &&
      html`<${Held} open=${open} hidden=${hidden} stats=${stats} now=${at} />
        <dl class="stats">
          <${Stat} id="stat-messages" label="Messages" value=${count(stats.messages, stats.estimated)} title=${stats.estimated ? "an upper bound" : null} />
          <${Stat} id="stat-bytes" label="Size" value=${bytes(stats.bytes, stats.estimated)} title=${`${count(stats.bytes)} bytes`} />
          <${Stat} id="stat-oldest" label="Oldest" value=${stats.oldestAgeMs == null ? "–" : `${duration(stats.oldestAgeMs)} ago`} title=${stats.oldestAgeMs == null ? null : time(at - stats.oldestAgeMs)} />
          <${Stat} id="stat-in" label="In, a second" value=${rate(stats.publishPerSecond)} />
          <${Stat} id="stat-out" label="Out, a second" value=${rate(stats.pollPerSecond)} />
          <${Stat} id="stat-parked" label="Waiting polls" value=${count(stats.parkedPolls)} />
          <${Stat} id="stat-generation" label="Generation" value=${stats.generation} title=${`made ${time(stats.createdMs)}`} />
          ${stats.owner && html`<${Stat} id="stat-owner" label="Owner" value=${stats.owner} />`}
          ${history && html`<div class="stat"><dt>Last hour</dt><dd><${Spark} values=${history.published} label="messages published in each of the last 60 minutes" /></dd></div>`}
        </dl>`}
      ${stats && html`<${Viewer} mounted=${(viewer) => (this.viewer = viewer)} app=${app} route=${route} stats=${stats} now=${at} />`}
      ${readers && html`<${Readers} readers=${readers} measured=${measured ?? {}} from=${Number(this.query.get("readers") ?? 0)} now=${at} />`}
      ${properties && html`<${Properties} app=${app} topic=${this.name} path=${this.path("properties")} properties=${properties} deduplication=${deduplication} etag=${etag} saved=${() => this.refresh()} />`}
      ${properties &&
      html`<section aria-labelledby="danger"><h2 id="danger">Delete</h2>
        <p class="muted">Takes the topic and its messages from every reader at once.</p>
        <${Guarded} app=${app} verb="admin" on=${this.name} class="danger" data-testid="topic-delete" onClick=${this.attempt(this.remove)}>Delete this topic …</${Guarded}>
      </section>`}`;
  }
}

async function optional(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error instanceof Problem) return null;
    throw error;
  }
}

// Who holds committed readers, since when, and how much they do not see.
function Held({ open, hidden, stats, now }) {
  const first = open?.find((each) => Number(each.hiddenMessages) > 0) ?? open?.[0];
  if (!first && !(stats.openTransactions > 0 && hidden > 0)) return null;
  if (!first) {
    return html`<div class="banner" data-testid="held-banner"><strong>Committed readers are held</strong> by a transaction that this daemon does not decide. ${many(hidden, "message")} hidden.</div>`;
  }
  return html`<div class="banner" data-testid="held-banner">
    <div><strong>Committed readers are held</strong> by a transaction of ${first.clientId ? html`<strong>${first.clientId}</strong>` : "an unnamed client"}, open for ${duration(now - first.startedMs)} (since ${time(first.startedMs)}).
      ${hidden > 0 ? ` ${many(hidden, "message")} hidden.` : " Nothing is hidden yet."}
      ${open.length > 1 ? ` ${many(open.length - 1, "more open transaction")} behind it.` : ""}
      ${first.expiresMs ? ` It ends by itself in ${duration(first.expiresMs - now)}.` : ""}</div>
    <a class="button" data-testid="held-open" href=${transactionUrl(first.id)}>Open the transaction</a>
  </div>`;
}

function Readers({ readers, measured, from, now }) {
  if (!readers.length) {
    return html`<section aria-labelledby="readers-title"><h2 id="readers-title">Readers</h2>
      <p class="muted" data-testid="readers">No reader keeps its position here. Polls take positions of their own, which nobody is told.</p></section>`;
  }
  return html`<section aria-labelledby="readers-title"><h2 id="readers-title">Readers</h2>
    <${TableFrame} label="Readers"><table data-testid="readers">
      <caption class="offscreen">Readers that keep their position here</caption>
      <thead><tr><th scope="col">Name</th><th scope="col" class="number">To come</th><th scope="col" class="number">Hidden</th><th scope="col" class="number">Expired unread</th><th scope="col">Last seen</th><th scope="col">Position</th></tr></thead>
      <tbody>${readers.slice(from, from + MEASURED_READERS).map((reader) => {
        const ahead = measured[reader.name];
        return html`<${Row} key=${reader.name} data-testid="reader-row" data-reader=${reader.name}>
          <th scope="row">${reader.name}</th>
          <td class="number">${count(ahead?.visible, ahead?.estimated)}</td>
          <td class=${`number ${ahead?.hidden > 0 ? "warn" : ""}`}>${count(ahead?.hidden, ahead?.estimated)}</td>
          <td class=${`number ${ahead?.expiredUnread > 0 ? "bad" : ""}`}>${count(ahead?.expiredUnread)}</td>
          <td title=${time(reader.changedMs)}>${duration(now - reader.changedMs)} ago</td>
          <td><code class="id">${reader.position}</code></td>
        </${Row}>`;
      })}</tbody>
    </table></${TableFrame}>
    <${Pager} from=${from} total=${readers.length} name="readers" onMove=${() => {}} />
  </section>`;
}

// Properties, changed only after a preview, and only while they are as they were shown.
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
    try {
      const body = this.body();
      const { etag } = this.props;
      const asked = await preview(this.props.app, "PUT", this.props.path, body);
      this.setState({ asked: { ...asked, etag: asked.etag ?? etag, body }, error: null });
    } catch (error) {
      this.setState({ error, asked: null });
    }
  }

  async apply() {
    const { asked } = this.state;
    try {
      await ask(this.props.path, { method: "PUT", body: asked.body, headers: asked.etag ? { "If-Match": asked.etag } : {} });
      this.setState({ edited: {}, asked: null });
      this.props.app.say("The properties were changed");
      this.props.saved();
    } catch (error) {
      if (error.code === "precondition_failed") error.message = "The topic has changed since the preview, and nothing was done.";
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
        ${this.field("ttl", "ttl, seconds", ttl > 0 ? duration(ttl * 1000) : "as the daemon's default")}
        ${this.field("max_bytes", "max_bytes", most > 0 ? bytes(most) : "no bound")}
        ${this.choice("transactional", "transactional", ["optional", "required", "disabled"], "whether publishes need a write pointer")}
        ${this.choice("deduplication", "deduplication", ["inherit", "enabled", "disabled"], deduplication ? `${deduplication.enabled ? "on" : "off"}, as the ${deduplication.level} says` : "")}
      </form>
      <p class="buttons start">
        <${Guarded} app=${app} verb="admin" on=${topic} data-testid="preview" disabled=${!this.changed()} onClick=${() => this.preview()}>Preview the change</${Guarded}>
        ${this.changed() && html`<button type="button" onClick=${() => this.setState({ edited: {}, asked: null, error: null })}>Put back</button>`}
      </p>
      <${ErrorPanel} error=${error} />
      ${asked &&
      html`<div class="preview">
        <div data-testid="preview-effect" data-hides=${asked.effect?.hides?.messages ?? 0}>
          ${asked.changed?.length ? html`<p><strong>Changes ${asked.changed.join(", ")}.</strong></p>` : null}
          ${effectLines(asked).map((line) => html`<p>${line}</p>`)}
        </div>
        <p class="buttons start"><button type="button" class="danger" data-testid="apply" onClick=${() => this.apply()}>Apply</button></p>
      </div>`}
    </section>`;
  }
}
