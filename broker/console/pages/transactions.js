// Transactions: their age, the messages they hide, the readers they hold, and how to end one.

import { Problem, get, now, pathOf, topicPath } from "../api.js";
import { count, duration, many, time } from "../format.js";
import { carryOut, effectLines, preview, said } from "../preview.js";
import { ErrorPanel, Guarded, PAGE_ROWS, Page, Pager, Row, TableFrame, TopicLink, goQuery, html } from "../ui.js";

const MOST = 1000;
const BARS = 100;
// Topics of a transaction for which readers are requested.
const HELD_TOPICS = 10;
const HELD_READERS = 20;
const STATES = { in_progress: ["open", "warn"], invalid: ["invalid", "bad"], committed: ["committed", "good"], aborted: ["rolled back", "muted"], unknown: ["unknown", "muted"] };

export class Transactions extends Page {
  title = "Transactions";

  interest() {
    return { kinds: "transactions" };
  }

  moved(before) {
    const changed = (name) => before.get(name) !== this.query.get(name);
    // Open or close a transaction at once, before the list has loaded.
    if (changed("open") && !(changed("state") && this.query.get("open"))) this.open().catch((error) => this.failed(error));
    if (changed("state")) super.moved();
  }

  async load() {
    const state = this.query.get("state");
    const found = await get("/v1/transactions", { state, limit: MOST, longs: "string" });
    this.setState({ found, at: now() });
    await this.open();
  }

  // Load the transaction in the URL, which may no longer be in the list, and the readers it holds.
  async open() {
    const id = this.query.get("open");
    // The answer to an earlier request is out of date.
    const turn = (this.turn = (this.turn ?? 0) + 1);
    if (!id) return this.setState({ opened: null });
    const opened = await get(pathOf("transactions", id), { longs: "string" });
    const holds = await this.holds(opened);
    if (!this.gone && turn === this.turn && this.query.get("open") === id) this.setState({ opened, holds });
  }

  async holds({ topics }) {
    const found = [];
    for (const name of (topics ?? []).slice(0, HELD_TOPICS)) found.push(await this.held(name));
    return found;
  }

  // Load the readers of a topic that do not see all of it, and how many messages are hidden.
  async held(name) {
    const [ns, topic] = name.split(":");
    try {
      const [lag, stats] = await Promise.all([
        get(topicPath(ns, topic, "lag"), { limit: HELD_READERS }),
        get(topicPath(ns, topic, "stats"), { reader: "0".repeat(40) }),
      ]);
      const held = lag.readers.filter((each) => each.hidden > 0);
      return { name, hidden: stats.reader.hidden, estimated: stats.reader.estimated, parked: stats.parkedPolls, held, more: Math.max(0, lag.total - lag.readers.length) };
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      return { name, error: error.message };
    }
  }

  async end(transaction, call) {
    const id = transaction.id;
    const path = pathOf("transactions", id, call);
    const asked = await preview(path, "POST");
    const holds = await this.holds(transaction);
    const held = holds.flatMap((each) => (each.held ?? []).map((reader) => `${reader.name} of ${each.name}`));
    const words = {
      abort: ["Abort this transaction?", "Abort", "Its messages are rolled back in every topic. This cannot be undone."],
      invalidate: ["Invalidate this transaction?", "Invalidate", "Its messages are hidden forever, and removed later. This cannot be undone."],
    }[call];
    const whose = `Transaction ${id}${transaction.clientId ? ` of ${transaction.clientId}` : ""}, open for ${duration(now() - transaction.startedMs)}.`;
    this.props.app.confirm({
      title: words[0],
      lines: [whose, ...effectLines(asked, { held }), words[2]],
      action: words[1],
      run: async () => {
        const done = await carryOut(path, "POST");
        this.props.app.say(said(`The transaction is ${done.state === "invalid" ? "invalid" : "rolled back"}`, done));
        await this.refresh();
      },
    });
  }

  // Remove exactly the previewed transactions from the list of invalid ones.
  async truncate(transactions) {
    const path = pathOf("transactions", "truncate");
    const body = { ids: transactions.map((each) => each.id) };
    const asked = await preview(path, "POST", body);
    const one = transactions.length === 1 ? transactions[0] : null;
    this.props.app.confirm({
      title: one ? "Remove this transaction from the list of invalid ones?" : `Remove ${many(transactions.length, "transaction")} from the list of invalid ones?`,
      lines: [
        one ? `Transaction ${one.id}${one.clientId ? ` of ${one.clientId}` : ""}.` : `The oldest is ${transactions[0].id}.`,
        ...effectLines(asked),
        "Their remaining messages are rolled back first; a transaction whose topics cannot all be reached stays. The daemon does this automatically as it cleans; do it by hand only if it cannot.",
      ],
      action: "Truncate",
      run: async () => {
        const done = await carryOut(path, "POST", { body });
        this.props.app.say(`${many(done.removed, "transaction")} removed from the list`);
        await this.refresh();
      },
    });
  }

  attempt(action) {
    return (event) => {
      event.stopPropagation();
      action().catch((error) => this.refused(error));
    };
  }

  toggle(id) {
    goQuery({ open: this.query.get("open") === id ? null : id }, { replace: true });
  }

  render({ app }, { error, found, opened, holds }) {
    const at = this.when;
    const state = this.query.get("state");
    const from = Number(this.query.get("rows") ?? 0);
    const invalid = (found ?? []).filter((each) => each.state === "invalid");
    const listed = found && opened && !found.some((each) => each.id === opened.id) ? [opened, ...found] : found;
    return html`<div class="head"><h1 tabindex="-1">Transactions</h1>
        <span class="group" role="group" aria-label="State">
          ${[[null, "Open and invalid"], ["in_progress", "Open"], ["invalid", "Invalid"], ["committed", "Committed"], ["aborted", "Rolled back"]].map(
            ([value, label]) => html`<button type="button" data-testid=${`state-${value ?? "all"}`} aria-pressed=${state === value} onClick=${() => goQuery({ state: value, rows: null, open: null })}>${label}</button>`,
          )}
        </span>
        ${invalid.length > 1 && html`<span class="grow"><${Guarded} app=${app} verb="operate" on="service" data-testid="tx-truncate-all" onClick=${this.attempt(() => this.truncate(invalid))}>Truncate ${count(invalid.length)} invalid …</${Guarded}></span>`}
      </div>
      <${ErrorPanel} error=${error} />
      ${listed &&
      (listed.length === 0
        ? html`<p class="muted" data-testid="transactions-empty">No ${state ? "such" : "open"} transactions. No reader is held.</p>`
        : html`<${Timeline} transactions=${listed} now=${at} onOpen=${(id) => this.toggle(id)} opened=${opened?.id} />
          <${TableFrame} label="Transactions"><table>
            <caption class="offscreen">Transactions, oldest first</caption>
            <thead><tr><th scope="col">Client</th><th scope="col">State</th><th scope="col" class="number">Age</th><th scope="col" class="number">Time left</th><th scope="col" class="number" title="Messages after it, in the topic with the most">Hides</th><th scope="col">Topics</th><th scope="col">Id</th><th scope="col"><span class="offscreen">End it</span></th></tr></thead>
            <tbody>${listed.slice(from, from + PAGE_ROWS).map((each) => [this.row(app, each, at, opened), opened?.id === each.id && html`<tr class="detail" key=${`${each.id} holds`}><td colspan="8"><${Holds} transaction=${opened} holds=${holds} /></td></tr>`])}</tbody>
          </table></${TableFrame}>
          <${Pager} from=${from} total=${listed.length} onMove=${(next) => goQuery({ rows: next || null })} />
          ${found.length >= MOST && html`<p class="muted">The oldest ${count(MOST)}; there may be more.</p>`}`)}`;
  }

  row(app, each, now, opened) {
    const [word, color] = STATES[each.state] ?? [each.state, ""];
    const open = () => this.toggle(each.id);
    const ends = each.state === "in_progress";
    const on = "service";
    // The name that began a transaction may end it, too.
    const verb = each.name && each.name === app.state.who?.name ? "transact" : "operate";
    return html`<${Row} key=${each.id} data-testid="tx-row" data-id=${each.id} data-state=${each.state} class=${opened?.id === each.id ? "open" : ""} open=${open}
      onClick=${(event) => !event.target.closest("button,a") && open()}>
      <th scope="row"><button type="button" class="plain" aria-expanded=${opened?.id === each.id} onClick=${open}>${each.clientId || "unnamed"}</button>${each.name && each.name !== each.clientId ? html` <span class="muted">${each.name}</span>` : ""}</th>
      <td><span class=${`state ${color}`}>${word}</span>${each.type === "long" ? " long" : ""}</td>
      <td class="number" title=${`begun ${time(each.startedMs)}`}>${each.startedMs == null ? "–" : duration(now - each.startedMs)}</td>
      <td class="number" title=${each.expiresMs ? time(each.expiresMs) : null}>${ends ? (each.expiresMs ? duration(each.expiresMs - now) : "no time-out") : "–"}</td>
      <td class=${`number ${each.hiddenMessages > 0 ? "warn" : ""}`} data-testid="tx-hidden">${count(each.hiddenMessages)}</td>
      <td>${(each.topics ?? []).slice(0, 3).map((name, i) => html`${i > 0 && ", "}<${TopicLink} name=${name} />`)}${each.topics?.length > 3 ? ` and ${each.topics.length - 3} more` : ""}</td>
      <td><code class="id">${each.id}</code></td>
      <td class="actions">${ends &&
        html`<${Guarded} app=${app} verb=${verb} on=${on} data-testid="tx-abort" onClick=${this.attempt(() => this.end(each, "abort"))}>Abort …</${Guarded}>
          <${Guarded} app=${app} verb=${verb} on=${on} data-testid="tx-invalidate" onClick=${this.attempt(() => this.end(each, "invalidate"))}>Invalidate …</${Guarded}>`}
        ${each.state === "invalid" && html`<${Guarded} app=${app} verb="operate" on=${on} data-testid="tx-truncate" onClick=${this.attempt(() => this.truncate([each]))}>Truncate …</${Guarded}>`}</td>
    </${Row}>`;
  }
}

// The readers that a transaction holds.
function Holds({ transaction, holds }) {
  if (!transaction.topics?.length) return html`<p data-testid="tx-holds">It has no undecided messages, and holds no reader.</p>`;
  return html`<div data-testid="tx-holds">
    <table><caption>What it holds</caption>
      <thead><tr><th scope="col">Topic</th><th scope="col" class="number">Hidden messages</th><th scope="col" class="number">Waiting polls</th><th scope="col">Held readers</th></tr></thead>
      <tbody>${(holds ?? []).map((each) => html`<tr key=${each.name}><th scope="row"><${TopicLink} name=${each.name} /></th>
        ${each.error
          ? html`<td colspan="3" class="muted">${each.error}</td>`
          : html`<td class="number">${count(each.hidden, each.estimated)}</td><td class="number">${count(each.parked)}</td>
            <td>${each.held.length ? each.held.map((reader) => `${reader.name} (${many(reader.hidden, "message")} hidden)`).join(", ") : "no known reader"}${each.more > 0 ? `, and ${many(each.more, "reader")} not checked` : ""}</td>`}</tr>`)}</tbody>
    </table>
    ${transaction.topics.length > HELD_TOPICS && html`<details data-testid="tx-more-topics"><summary>and ${transaction.topics.length - HELD_TOPICS} more topics</summary>
      ${transaction.topics.slice(HELD_TOPICS).map((name, i) => html`${i > 0 && ", "}<${TopicLink} name=${name} />`)}</details>`}
  </div>`;
}

// One bar for each transaction, from its start to its decision or now, and a thin one from now to its deadline. Those
// decided before the oldest open one began are only in the table: they would make the other bars short.
function Timeline({ transactions, now, onOpen, opened }) {
  const begun = transactions.filter((each) => each.startedMs != null);
  const open = begun.filter((each) => each.state === "in_progress");
  const start = Math.min(...(open.length ? open : begun).map((each) => each.startedMs));
  const shown = begun.filter((each) => (each.decidedMs ?? now) >= start).slice(0, BARS);
  if (!shown.length) return null;
  const end = Math.max(now, ...open.map((each) => each.expiresMs ?? 0));
  const span = Math.max(1000, end - start);
  const at = (ms) => (100 * (Math.min(end, Math.max(start, ms)) - start)) / span;
  const between = (from, to) => ({ left: `${at(from)}%`, width: `${Math.max(0.3, at(to) - at(from))}%` });
  return html`<div class="timeline" data-testid="timeline" aria-hidden="true">
    <div class="lanes">
      <span class="now" style=${{ left: `${at(now)}%` }}></span>
      ${shown.map((each) => {
        const [word, color] = STATES[each.state] ?? [each.state, ""];
        const until = Math.min(each.decidedMs ?? now, now);
        const name = each.clientId || "unnamed";
        return html`<div key=${each.id} class=${`lane ${color} ${opened === each.id ? "chosen" : ""}`} data-testid="tx-bar" data-id=${each.id} title=${`${name}, ${word}, ${duration(until - each.startedMs)}`} onClick=${() => onOpen(each.id)}>
          <span class="bar" style=${between(each.startedMs, until)}></span>
          ${each.state === "in_progress" && each.expiresMs > now && html`<span class="bar left" style=${between(now, each.expiresMs)}></span>`}
          <span class="name" style=${at(each.startedMs) > 60 ? { right: `${100 - at(each.startedMs)}%` } : { left: `${at(each.startedMs)}%` }}>${name}</span>
        </div>`;
      })}
    </div>
    <div class="ends"><span>${time(start)}</span><span>${end > now + 1000 ? `${time(end)}, the last deadline` : "now"}</span></div>
  </div>`;
}
