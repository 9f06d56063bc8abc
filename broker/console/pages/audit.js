// The audit log: the newest records of the topic system:audit.

import { Problem, ask, topicPath } from "../api.js";
import { asText, fromBase64, parse, time } from "../format.js";
import { ErrorPanel, FilterField, Page, Row, TableFrame, goQuery, html } from "../ui.js";

const LIMIT = 100;

// Read a topic of JSON records, newest first.
export async function records(topic, query) {
  const { data, headers } = await ask(topicPath("system", topic, "messages"), { query: { order: "desc", limit: LIMIT, payload: "base64", longs: "string", ...query } });
  const found = data.map((each) => ({ id: each.id, at: each.publishTimeMs, record: read(each) }));
  return { found, more: headers.get("Plainsong-End") === "more", lastId: headers.get("Plainsong-Last-Id") };
}

function read(message) {
  try {
    return parse(asText(fromBase64(message.payload.base64)));
  } catch {
    return null;
  }
}

export class Audit extends Page {
  title = "Audit";

  interest() {
    return { topics: "system:audit", kinds: "topics" };
  }

  async load() {
    try {
      this.setState({ ...(await records("audit", { to: this.query.get("to"), filter: this.query.get("filter") })), missing: false });
    } catch (error) {
      if (!(error instanceof Problem && error.code === "topic_not_found")) throw error;
      this.setState({ missing: true });
    }
  }

  render(_, { error, found, more, lastId, missing }) {
    const opened = this.query.get("open");
    return html`<div class="head"><h1 tabindex="-1">Audit</h1>
        <form onSubmit=${(event) => (event.preventDefault(), goQuery({ filter: event.currentTarget.elements[0].value, to: null }))}>
          <label><span class="offscreen">Only records that contain</span><${FilterField} data-testid="audit-filter" shown=${this.query.get("filter")} placeholder="contains …  ( / )" /></label></form></div>
      <${ErrorPanel} error=${error} />
      ${missing && html`<p class="muted" data-testid="audit-empty">There is no audit log yet: the topic <code>system:audit</code> is created at the first start with <code>security.authentication = "required"</code>.</p>`}
      ${found && !missing && found.length === 0 && html`<p class="muted" data-testid="audit-empty">No records ${this.query.get("filter") ? "that contain this" : "yet"}${more ? " among those searched; Older continues the search" : ""}.</p>`}
      ${found?.length > 0 &&
      html`<${TableFrame} label="Audit"><table>
        <caption class="offscreen">Audit records, newest first</caption>
        <thead><tr><th scope="col" aria-sort="descending">When</th><th scope="col">Who</th><th scope="col">Action</th><th scope="col">Target</th><th scope="col">Outcome</th><th scope="col">From</th></tr></thead>
        <tbody>${found.map(({ id, at, record }) => {
          const open = () => goQuery({ open: opened === id ? null : id }, { replace: true });
          const outcome = record?.outcome ?? "";
          return [
            html`<${Row} key=${id} data-testid="audit-row" data-id=${id} class=${opened === id ? "open" : ""} open=${open} onClick=${open}>
              <td><button type="button" class="plain stamp" aria-expanded=${opened === id} onClick=${(event) => (event.stopPropagation(), open())}>${time(record?.at ? Date.parse(record.at) : at)}</button></td>
              <th scope="row">${record?.name ?? "–"}</th>
              <td>${record?.action ?? "not a record"}${record?.repeated > 1 ? ` × ${record.repeated}` : ""}</td>
              <td>${record?.target ?? ""}</td>
              <td><span class=${`state ${outcome === "refused" ? "warn" : outcome === "unknown" ? "bad" : ""}`}>${outcome}</span>${record?.code ? ` ${record.code}` : ""}</td>
              <td>${record?.remote ?? ""}</td>
            </${Row}>`,
            opened === id && html`<tr class="detail" key=${`${id} open`}><td colspan="6"><pre tabindex="0">${JSON.stringify(record, null, 2)}</pre></td></tr>`,
          ];
        })}</tbody>
      </table></${TableFrame}>`}
      ${found && !missing && (found.length > 0 || more || this.query.get("to")) &&
      html`<p class="pager"><button type="button" data-testid="page-previous" disabled=${!this.query.get("to")} onClick=${() => goQuery({ to: null })}>Newest</button>
        <button type="button" data-testid="page-next" disabled=${!more} onClick=${() => goQuery({ to: lastId ?? found.at(-1).id })}>Older</button></p>`}`;
  }
}
