// Attention items, and all topics; the daemon sorts and paginates them.

import { get, now, topicPath } from "../api.js";
import { bytes, count, duration, rate, time } from "../format.js";
import { carryOut, effectLines, preview } from "../preview.js";
import { Component, ErrorPanel, FilterField, Guarded, Page, Row, SortHead, Spark, TableFrame, createRef, go, goQuery, html, nextPage, previousPage, topicUrl } from "../ui.js";
import { Attention } from "./attention.js";
import { SecondCopy } from "./copy.js";
import { undelete } from "./mend.js";

const LIMIT = 100;
const FILTER_MS = 250;
const HISTORY_MS = 60000;
const HISTORIES_AT_ONCE = 6;
// The length of a URL is limited, and names may be long.
const MOST_NAMES_CHARS = 16000;
const COLUMNS = [
  ["name", "Topic", false],
  ["messages", "Messages", true],
  ["bytes", "Size", true],
  ["oldestAgeMs", "Oldest", true],
  ["publishPerSecond", "In per second", true],
  ["pollPerSecond", "Out per second", true],
  ["hiddenMessages", "Hidden", true],
];

export class Overview extends Page {
  title = "Overview";

  interest() {
    let topics = "";
    for (const each of this.state.rows ?? []) {
      const name = `${each.namespace}:${each.name}`;
      if (topics.length + name.length < MOST_NAMES_CHARS) topics += `${topics && ","}${name}`;
    }
    return topics ? { topics, kinds: "topics,attention" } : { kinds: "attention" };
  }

  // Visible rows are updated in place; their order changes only on request.
  onEvent(name, data) {
    if (name === "attention") {
      this.news.attention = data;
      this.setState({ attention: data });
    }
    if (name === "topics") {
      for (const each of data) this.news.topics.set(`${each.namespace}:${each.name}`, each);
      this.setState(({ rows }) => ({ rows: this.withNews(rows), at: now() }));
    }
  }

  // Events since the last load began. The load's answer may be older than these, and the stream does not repeat them.
  news = { attention: null, topics: new Map() };

  withNews(rows) {
    return rows?.map((each) => this.news.topics.get(`${each.namespace}:${each.name}`) ?? each);
  }

  get sort() {
    return this.query.get("sort") ?? "name";
  }

  get order() {
    return this.query.get("order") ?? (this.sort === "name" ? "asc" : "desc");
  }

  async load() {
    this.news = { attention: null, topics: new Map() };
    if (this.deleted) return this.loadDeleted();
    const query = { q: this.query.get("q"), namespace: this.query.get("namespace"), sort: this.sort, order: this.order, limit: LIMIT, after: this.query.get("after") };
    const [{ topics, total, next }, attention] = await Promise.all([get("/v1/topics", query), get("/v1/attention")]);
    this.setState({ rows: this.withNews(topics), total, next, attention: this.news.attention ?? attention, at: now() }, () => this.props.app.live.again(this));
    this.learnHistories(topics);
  }

  get deleted() {
    return this.query.get("deleted") === "1";
  }

  async loadDeleted() {
    const query = { q: this.query.get("q"), namespace: this.query.get("namespace"), deleted: true, limit: LIMIT };
    const [{ topics, total }, attention] = await Promise.all([get("/v1/topics", query), get("/v1/attention")]);
    this.setState({ gone: topics, rows: null, total, next: null, attention: this.news.attention ?? attention, at: now() });
  }

  undelete(each) {
    const { app } = this.props;
    return () => undelete(app, each.namespace, each.name, () => go(topicUrl(each.namespace, each.name))).catch((error) => this.refused(error));
  }

  // Load the last hour of each topic, a few at a time; only once for a topic that was idle for an hour and still is.
  async learnHistories(topics) {
    this.histories ??= new Map();
    const at = Date.now();
    const isOld = (each) => {
      const known = this.histories.get(`${each.namespace}:${each.name}`);
      const moves = each.publishPerSecond > 0 || each.pollPerSecond > 0 || known?.values?.some((value) => value > 0);
      return !known || (moves && at - known.at > HISTORY_MS);
    };
    const wanted = topics.filter(isOld);
    const learn = async ({ namespace, name }) => {
      const history = await get(topicPath(namespace, name, "history")).catch(() => null);
      this.histories.set(`${namespace}:${name}`, { at, values: history?.published.some((value) => value > 0) ? history.published : null });
    };
    for (let i = 0; i < wanted.length && !this.gone; i += HISTORIES_AT_ONCE) await Promise.all(wanted.slice(i, i + HISTORIES_AT_ONCE).map(learn));
    if (wanted.length && !this.gone) this.forceUpdate();
  }

  sortBy(column) {
    const active = this.sort === column;
    const order = active ? (this.order === "desc" ? "asc" : "desc") : column === "name" ? "asc" : "desc";
    goQuery({ sort: column, order, after: null });
  }

  componentWillUnmount() {
    clearTimeout(this.typing); // the URL belongs to another page now
    super.componentWillUnmount();
  }

  filter(text) {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => goQuery({ q: text.trim(), after: null }, { replace: true }), FILTER_MS);
  }

  render({ app }, { error, rows, gone, total, next, attention, creating }) {
    const at = this.when;
    const after = this.query.get("after");
    return html`<div class="head"><h1 tabindex="-1">Overview</h1></div>
      <${ErrorPanel} error=${error} />
      <${Attention} items=${attention} now=${at} />
      <${SecondCopy} app=${app} attention=${attention} />
      <section aria-labelledby="topics-title">
        <div class="head"><h2 id="topics-title">${this.deleted ? "Deleted topics" : "Topics"}</h2><span class="muted" data-testid="topics-total">${total == null ? "" : count(total)}</span>
          <label class="grow"><span class="offscreen">Filter topics by name</span><${FilterField} type="search" data-testid="topic-filter" typing shown=${this.query.get("q")} placeholder="filter by name  ( / )" onInput=${(event) => this.filter(event.currentTarget.value)} /></label>
          <button type="button" data-testid="topics-deleted" aria-pressed=${this.deleted} onClick=${() => goQuery({ deleted: this.deleted ? null : 1, after: null })}>Deleted</button>
          <button type="button" data-testid="topic-create" aria-expanded=${Boolean(creating)} onClick=${() => this.setState({ creating: !creating })}>New topic …</button>
        </div>
        ${creating && html`<${Create} app=${app} done=${(ns, topic) => go(topicUrl(ns, topic))} />`}
        ${this.deleted && gone && html`<${Gone} app=${app} topics=${gone} total=${total} now=${at} undelete=${(each) => this.undelete(each)} />`}
        ${!this.deleted &&
        rows &&
        (rows.length === 0
          ? html`<p class="muted" data-testid="topics-empty">${this.query.get("q") ? "No topic name contains this text." : "There are no topics yet."}</p>`
          : html`<${TableFrame} label="Topics"><table data-testid="topics">
              <caption class="offscreen">Topics by ${this.sort}</caption>
              <thead><tr>${COLUMNS.map(([column, label, number]) => html`<${SortHead} column=${column} label=${label} number=${number} sort=${this.sort} order=${this.order} onSort=${(each) => this.sortBy(each)} />`)}<th scope="col">Last hour</th></tr></thead>
              <tbody>${rows.map((each) => this.row(each))}</tbody>
            </table></${TableFrame}>
            ${(after || next) &&
            html`<p class="pager"><button type="button" data-testid="page-previous" disabled=${!after} onClick=${() => previousPage("after")}>Previous</button>
              <button type="button" data-testid="page-next" disabled=${!next} onClick=${() => nextPage("after", next)}>Next</button></p>`}`)}
      </section>`;
  }

  row(each) {
    const name = `${each.namespace}:${each.name}`;
    const url = topicUrl(each.namespace, each.name);
    return html`<${Row} key=${name} data-testid="topic-row" data-topic=${name} open=${() => go(url)}>
      <th scope="row"><a href=${url}>${name}</a></th>
      <td class="number" data-testid="cell-messages">${count(each.messages, each.estimated)}</td>
      <td class="number" data-testid="cell-bytes" title=${`${count(each.bytes)} bytes`}>${bytes(each.bytes, each.estimated)}</td>
      <td class="number" data-testid="cell-age">${each.oldestAgeMs == null ? "–" : duration(each.oldestAgeMs + this.when - this.state.at)}</td>
      <td class="number" data-testid="cell-in">${rate(each.publishPerSecond)}</td>
      <td class="number" data-testid="cell-out">${rate(each.pollPerSecond)}</td>
      <td class=${`number ${each.hiddenMessages > 0 ? "warn" : ""}`} data-testid="cell-hidden">${count(each.hiddenMessages)}</td>
      <td><${Spark} values=${this.histories?.get(name)?.values} label=${`messages published to ${name} in each of the last 60 minutes`} /></td>
    </${Row}>`;
  }
}

// Deleted topics, latest first, and for how long each can be restored.
function Gone({ app, topics, total, now, undelete }) {
  if (!topics.length) return html`<p class="muted" data-testid="deleted-empty">No topic was deleted recently.</p>`;
  return html`<${TableFrame} label="Deleted topics"><table data-testid="deleted">
      <caption class="offscreen">Deleted topics, latest first</caption>
      <thead><tr><th scope="col">Topic</th><th scope="col">Deleted</th><th scope="col" class="number">Messages</th><th scope="col" class="number">Size</th><th scope="col">Can be restored</th><th scope="col"><span class="offscreen">Restore</span></th></tr></thead>
      <tbody>${topics.map((each) => {
        const name = `${each.namespace}:${each.name}`;
        const kept = each.state === "kept";
        return html`<${Row} key=${`${name} ${each.generation}`} data-testid="deleted-row" data-topic=${name} open=${() => go(topicUrl(each.namespace, each.name))}>
          <th scope="row"><a href=${topicUrl(each.namespace, each.name)}>${name}</a></th>
          <td title=${time(each.deletedMs)}>${duration(now - each.deletedMs)} ago</td>
          <td class="number">${count(each.messages)}</td>
          <td class="number">${bytes(each.bytes)}</td>
          <td title=${time(each.undeleteUntilMs)}>${kept ? `for ${duration(each.undeleteUntilMs - now)}` : "no longer"}</td>
          <td class="actions">${kept && html`<${Guarded} app=${app} verb="admin" on=${name} data-testid="topic-undelete" onClick=${undelete(each)}>Undelete …</${Guarded}>`}</td>
        </${Row}>`;
      })}</tbody>
    </table></${TableFrame}>
    ${total > topics.length && html`<p class="muted">and ${count(total - topics.length)} more; filter by name to find them</p>`}`;
}

class Create extends Component {
  constructor(props) {
    super(props);
    this.state = { name: "", ttl: "", asked: null, error: null };
    this.field = createRef();
  }

  componentDidMount() {
    this.field.current.focus();
  }

  parts() {
    const [ns, topic] = this.state.name.includes(":") ? this.state.name.trim().split(":") : ["default", this.state.name.trim()];
    return { ns, topic, path: topicPath(ns, topic), body: this.state.ttl ? { ttl: Number(this.state.ttl) } : {} };
  }

  async preview() {
    const { path, body } = this.parts();
    const { name, ttl } = this.state;
    // Ignore the answer if the input has changed since the request.
    const told = (news) => this.setState((state) => (state.name === name && state.ttl === ttl ? news : null));
    try {
      told({ asked: await preview(path, "PUT", body), error: null });
    } catch (error) {
      told({ error, asked: null });
    }
  }

  async apply() {
    const { ns, topic, path, body } = this.parts();
    try {
      await carryOut(path, "PUT", { body });
      this.props.app.say(`${ns}:${topic} was created`);
      this.props.done(ns, topic);
    } catch (error) {
      this.setState({ error, asked: null });
    }
  }

  render({ app }, { name, ttl, asked, error }) {
    const { ns, topic } = this.parts();
    const may = app.may("admin", `${ns}:${topic}`);
    return html`<form class="fields panel" onSubmit=${(event) => (event.preventDefault(), asked ? this.apply() : this.preview())}>
      <label>Name<input ref=${this.field} data-testid="create-name" placeholder="namespace:topic" spellcheck="false" value=${name} onInput=${(event) => this.setState({ name: event.currentTarget.value, asked: null })} /></label>
      <label>ttl, seconds<input inputmode="numeric" data-testid="create-ttl" placeholder="the daemon's default" value=${ttl} onInput=${(event) => this.setState({ ttl: event.currentTarget.value.trim(), asked: null })} /></label>
      <p class="buttons start"><button type="submit" data-testid=${asked ? "apply" : "preview"} disabled=${!topic || !may} title=${may ? null : `needs the verb admin on ${ns}:${topic}`}>${asked ? "Create it" : "Preview"}</button></p>
      <${ErrorPanel} error=${error} />
      ${asked && html`<div data-testid="preview-effect">${[`${ns}:${topic} is created${asked.after?.ttl ? `, and its messages expire after ${duration(asked.after.ttl * 1000)}` : ""}.`, ...effectLines(asked)].slice(0, 4).map((line) => html`<p>${line}</p>`)}</div>`}
    </form>`;
  }
}
