// Flows between datasets, which the pipeline's audit job publishes to the topic system:lineage.

import { Problem } from "../api.js";
import { count } from "../format.js";
import { ErrorPanel, Page, TableFrame, goQuery, html } from "../ui.js";
import { records } from "./audit.js";

const MOST_NODES = 40;
const NODE = { width: 200, height: 28, column: 280, row: 40 };

export class Lineage extends Page {
  title = "Lineage";

  interest() {
    return { topics: "system:lineage", kinds: "topics" };
  }

  async load() {
    try {
      const { found } = await records("lineage", { limit: 1000 });
      this.setState({ flows: merged(found.map((each) => each.record)), missing: found.length === 0 });
    } catch (error) {
      if (!(error instanceof Problem && error.code === "topic_not_found")) throw error;
      this.setState({ missing: true });
    }
  }

  render(_, { error, flows, missing }) {
    const focus = this.query.get("dataset");
    return html`<div class="head"><h1 tabindex="-1">Lineage</h1></div>
      <${ErrorPanel} error=${error} />
      ${missing && html`<p class="muted" data-testid="lineage-empty">No lineage has been published. The pipeline's audit job publishes it: <code>plainsong pipeline run audit run TOPIC --root DIR --publish-lineage</code> sends the flows between datasets to the topic <code>system:lineage</code>, which <code>plainsong topic create lineage --namespace system</code> makes.</p>`}
      ${!missing && flows && html`<${Graph} flows=${flows} focus=${focus} />`}`;
  }
}

// Remove repeated flows, and keep the order, newest first.
function merged(found) {
  const flows = new Map();
  for (const each of found) {
    if (!each?.from || !each?.to) continue;
    const key = JSON.stringify([each.from, each.to]);
    if (!flows.has(key)) flows.set(key, { from: String(each.from), to: String(each.to), runs: each.runs ?? null });
  }
  return [...flows.values()];
}

function near(flows, focus) {
  if (!focus) return flows;
  const chosen = new Set([focus]);
  for (let grown = true; grown && chosen.size < MOST_NODES; ) {
    grown = false;
    for (const { from, to } of flows) {
      if (chosen.has(from) !== chosen.has(to)) {
        chosen.add(from).add(to);
        grown = true;
      }
    }
  }
  return flows.filter(({ from, to }) => chosen.has(from) && chosen.has(to));
}

// Columns by the longest path from a source; the number of rounds is bounded, since flows may form a cycle.
function layout(flows) {
  const names = [...new Set(flows.flatMap(({ from, to }) => [from, to]))].slice(0, MOST_NODES);
  const column = new Map(names.map((name) => [name, 0]));
  for (let round = 0; round < Math.min(names.length, 12); round += 1) {
    for (const { from, to } of flows) {
      if (column.has(from) && column.has(to) && from !== to && column.get(to) < column.get(from) + 1) column.set(to, Math.min(column.get(from) + 1, names.length - 1));
    }
  }
  const used = [...new Set(column.values())].sort((a, b) => a - b);
  const rows = new Map();
  return new Map(
    names.map((name) => {
      const x = used.indexOf(column.get(name));
      const y = rows.get(x) ?? 0;
      rows.set(x, y + 1);
      return [name, { x: x * NODE.column, y: y * NODE.row }];
    }),
  );
}

function Graph({ flows, focus }) {
  const shown = near(flows, focus);
  const places = layout(shown);
  const width = Math.max(0, ...[...places.values()].map((each) => each.x)) + NODE.width;
  const height = Math.max(0, ...[...places.values()].map((each) => each.y)) + NODE.row;
  const total = new Set(flows.flatMap(({ from, to }) => [from, to])).size;
  return html`<p class="muted">${count(places.size)} of ${count(total)} datasets, ${count(shown.length)} flows${focus ? html` near <strong>${focus}</strong>. <button type="button" class="plain" onClick=${() => goQuery({ dataset: null })}>Show all</button>` : ". Choose one to see what it comes from and what comes from it."}</p>
    <${TableFrame} label="Lineage graph"><div class="graph">
      <svg width=${width} height=${height} aria-hidden="true">${shown.map(({ from, to }) => {
        const [a, b] = [places.get(from), places.get(to)];
        if (!a || !b) return null;
        const [x1, y1, x2, y2] = [a.x + NODE.width, a.y + NODE.height / 2, b.x, b.y + NODE.height / 2];
        return html`<path d=${`M${x1} ${y1} C${x1 + 40} ${y1} ${x2 - 40} ${y2} ${x2} ${y2}`} fill="none" stroke="currentColor" />`;
      })}</svg>
      ${[...places].map(([name, { x, y }]) => html`<button type="button" key=${name} class=${`node ${name === focus ? "chosen" : ""}`} data-testid="lineage-node" data-dataset=${name} title=${name} style=${{ left: `${x}px`, top: `${y}px`, width: `${NODE.width}px` }} onClick=${() => goQuery({ dataset: name })}>${name}</button>`)}
    </div></${TableFrame}>
    <${TableFrame} label="Flows"><table><caption class="offscreen">Flows between datasets</caption><thead><tr><th scope="col">From</th><th scope="col">To</th><th scope="col" class="number">Runs</th></tr></thead>
      <tbody>${shown.slice(0, 150).map(({ from, to, runs }) => html`<tr key=${`${from} ${to}`}><th scope="row">${from}</th><td>${to}</td><td class="number">${count(runs)}</td></tr>`)}</tbody></table></${TableFrame}>`;
}
