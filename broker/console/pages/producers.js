// The producers that a topic remembers, each with its last sequence id.

import { get, now, topicPath } from "../api.js";
import { count, duration, time } from "../format.js";
import { carryOut, effectLines, preview } from "../preview.js";
import { ErrorPanel, Guarded, Page, Row, TableFrame, html, nextPage, previousPage, topicUrl } from "../ui.js";

const LIMIT = 100;

export class Producers extends Page {
  title = `Producers of ${this.props.route.ns}:${this.props.route.topic}`;

  path(...rest) {
    return topicPath(this.props.route.ns, this.props.route.topic, "producers", ...rest);
  }

  get name() {
    return `${this.props.route.ns}:${this.props.route.topic}`;
  }

  interest() {
    return { topics: this.name, kinds: "topics" };
  }

  async load() {
    this.setState({ found: await get(this.path(), { limit: LIMIT, after: this.query.get("after") }), at: now() });
  }

  async forget(producer) {
    const asked = await preview(this.path(producer), "DELETE");
    this.props.app.confirm({
      title: `Forget the producer ${producer}?`,
      lines: ["Messages that it sends again are stored as new, and its staged messages are removed.", ...effectLines(asked)],
      action: "Forget",
      run: async () => {
        await carryOut(this.path(producer), "DELETE");
        this.props.app.say(`${producer} was forgotten`);
        await this.refresh();
      },
    });
  }

  render({ app, route }, { error, found }) {
    const at = this.when;
    const after = this.query.get("after");
    return html`<div class="head"><h1 tabindex="-1">Producers of <a href=${topicUrl(route.ns, route.topic)}>${this.name}</a></h1></div>
      <${ErrorPanel} error=${error} />
      ${found && html`<p class="muted">${count(found.count)} remembered · ${found.deduplication.enabled ? "sequence ids are remembered" : "deduplication is off"}, set by the ${found.deduplication.level}</p>`}
      ${found?.producers.length === 0 && html`<p class="muted" data-testid="producers-empty">No producer ${after ? "after this name" : "has published here with sequence ids"}.</p>`}
      ${found?.producers.length > 0 &&
      html`<${TableFrame} label="Producers"><table>
        <caption class="offscreen">Producers by name</caption>
        <thead><tr><th scope="col">Name</th><th scope="col" class="number">Epoch</th><th scope="col" class="number">Stored up to</th><th scope="col" class="number">In progress</th><th scope="col">Last active</th><th scope="col">Forgotten in</th><th scope="col"><span class="offscreen">Forget it</span></th></tr></thead>
        <tbody>${found.producers.map((each) => html`<${Row} key=${each.producer} data-testid="producer-row" data-producer=${each.producer}>
          <th scope="row">${each.producer}${each.damaged ? html` <span class="state bad">damaged</span>` : ""}</th>
          <td class="number">${each.epoch}</td>
          <td class="number">${each.persisted < 0 ? "nothing yet" : count(each.persisted)}</td>
          <td class="number">${each.pushed > each.persisted ? count(each.pushed) : "–"}</td>
          <td title=${time(each.activeMs)}>${duration(at - each.activeMs)} ago</td>
          <td title=${time(each.expiresMs)}>${duration(each.expiresMs - at)}</td>
          <td class="actions"><${Guarded} app=${app} verb="admin" on=${this.name} data-testid="producer-delete" onClick=${() => this.forget(each.producer).catch((error) => this.refused(error))}>Forget …</${Guarded}></td>
        </${Row}>`)}</tbody>
      </table></${TableFrame}>`}
      ${found &&
      (after || found.next) &&
      html`<p class="pager">
        <button type="button" data-testid="page-previous" disabled=${!after} onClick=${() => previousPage("after")}>Previous</button>
        <button type="button" data-testid="page-next" disabled=${!found.next} onClick=${() => nextPage("after", found.next)}>Next</button></p>`}`;
  }
}
