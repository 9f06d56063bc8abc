// The instances with their shares, pins and drains, and the state of the instance that answers.

import { Problem, get, now, optional, pathOf } from "../api.js";
import { bytes, count, duration, many, time } from "../format.js";
import { carryOut, effectLines, preview, said } from "../preview.js";
import { setAside } from "./mend.js";
import { ErrorPanel, Guarded, Option, Page, Row, Stat, TableFrame, TopicLink, createRef, html } from "../ui.js";

const MOST_FINDINGS = 100;

export class Cluster extends Page {
  title = "Cluster";
  topic = createRef();
  instance = createRef();

  interest() {
    return { kinds: "cluster" };
  }

  async load() {
    const [cluster, version, ready, scrub] = await Promise.all([get("/v1/cluster"), get("/version"), readiness(), optional(get("/v1/scrub"))]);
    this.setState({ cluster, version, ready, scrub, at: now() });
  }

  scrub() {
    return this.attempt(() => ({ method: "POST", path: "/v1/scrub", title: "Read every row of this instance now?", lines: ["The instance reads at a bounded rate while it serves requests. It changes nothing, and lists damaged rows here."], action: "Scrub", done: "The scrub has begun", harmless: true }));
  }

  async change({ method, path, body, title, lines, action, done, dry = false, harmless = false }) {
    const asked = dry ? await preview(path, method, body) : null;
    this.props.app.confirm({
      title,
      lines: asked ? [...lines, ...effectLines(asked)] : lines,
      action,
      harmless,
      run: async () => {
        this.props.app.say(said(done, await carryOut(path, method, { body })));
        await this.refresh();
      },
    });
  }

  attempt(asked) {
    return () => this.change(asked()).catch((error) => this.refused(error));
  }

  drain(name) {
    return this.attempt(() => ({ method: "PUT", path: pathOf("cluster", "instances", name, "drain"), dry: true, title: `Drain ${name}?`, lines: ["All its topics move to the other instances, step by step. It continues to serve requests by forwarding them to the owners."], action: "Drain", done: `${name} is being drained` }));
  }

  undrain(name) {
    return this.attempt(() => ({ method: "DELETE", path: pathOf("cluster", "instances", name, "drain"), title: `End the drain of ${name}?`, lines: ["Topics move back to it, step by step."], action: "Undrain", done: `${name} gets its share of the topics again` }));
  }

  pin() {
    return this.attempt(() => {
      const [ns, topic] = this.topic.current.value.trim().split(":");
      const instance = this.instance.current.value;
      return { method: "PUT", path: pathOf("cluster", "pins", ns, topic ?? ""), body: { instance }, title: `Pin ${ns}:${topic} to ${instance}?`, lines: ["The topic stays there while that instance is available, and neither leaving nor drained."], action: "Pin", done: `${ns}:${topic} is pinned to ${instance}` };
    });
  }

  unpin(name) {
    return this.attempt(() => ({ method: "DELETE", path: pathOf("cluster", "pins", ...name.split(":")), title: `Unpin ${name}?`, lines: ["Its placement is automatic again."], action: "Unpin", done: `${name} is no longer pinned` }));
  }

  render({ app }, { error, cluster, version, ready, scrub, at }) {
    const alone = cluster?.zookeeper === null;
    const pins = Object.entries(cluster?.pins ?? {});
    const locked = alone ? "a single instance has nothing to drain or pin" : undefined;
    return html`<div class="head"><h1 tabindex="-1">Cluster</h1></div>
      <${ErrorPanel} error=${error} />
      ${cluster &&
      html`<dl class="stats">
          <${Stat} id="stat-ready" label="Ready" value=${ready?.ready ? "yes" : "no"} />
          <${Stat} id="stat-version" label="Version" value=${version.version} />
          <${Stat} id="stat-store" label="Store" value=${version.store ?? "–"} />
          <${Stat} id="stat-asked" label="Answered by" value=${alone ? "a single instance" : `${cluster.instance} at ${cluster.address}`} />
          <${Stat} id="stat-decides" label="Decides transactions" value=${ready?.transactions?.service === "embedded" ? cluster.transactions ?? "none at the moment" : ready?.transactions?.service ?? "–"} />
          ${cluster.zookeeper && html`<${Stat} id="stat-zookeeper" label="ZooKeeper" value=${cluster.zookeeper.connected ? "connected" : `disconnected since ${time(cluster.zookeeper.since)}`} />`}
        </dl>
        ${ready?.reasons?.map((each) => html`<p class="banner"><strong>${each.code}</strong> ${each.detail}</p>`)}
        ${ready?.transactions?.available === false && html`<p class="banner">Committed polls are refused: ${ready.transactions.why}</p>`}
        <${TableFrame} label="Instances"><table>
          <caption class="offscreen">Instances</caption>
          <thead><tr><th scope="col">Name</th><th scope="col">Address</th><th scope="col">State</th><th scope="col" class="number">Weight</th><th scope="col" class="number">Share</th><th scope="col" class="number">Open topics</th><th scope="col"><span class="offscreen">Change it</span></th></tr></thead>
          <tbody>${cluster.instances.map((each) => html`<${Row} key=${each.name} data-testid="instance-row" data-instance=${each.name}>
            <th scope="row">${each.name}</th>
            <td>${each.address || "–"}</td>
            <td>${each.leaving ? html`<span class="state warn">leaving</span>` : each.drained ? html`<span class="state warn">drained</span>` : each.topicsOpen === null ? html`<span class="state bad">does not answer</span>` : html`<span class="state good">serving</span>`}</td>
            <td class="number">${each.weight}</td>
            <td class="number">${each.slices} of 64</td>
            <td class="number">${count(each.topicsOpen)}</td>
            <td class="actions">${each.drained
              ? html`<${Guarded} app=${app} verb="operate" on="service" data-testid="undrain" disabled=${alone} title=${locked} onClick=${this.undrain(each.name)}>Undrain …</${Guarded}>`
              : html`<${Guarded} app=${app} verb="operate" on="service" data-testid="drain" disabled=${alone} title=${locked} onClick=${this.drain(each.name)}>Drain …</${Guarded}>`}</td>
          </${Row}>`)}</tbody>
        </table></${TableFrame}>
        <section aria-labelledby="pins-title"><h2 id="pins-title">Pinned topics</h2>
          ${pins.length === 0 ? html`<p class="muted">No topic is pinned.</p>` : html`<${TableFrame} label="Pins"><table><caption class="offscreen">Pinned topics</caption>
            <thead><tr><th scope="col">Topic</th><th scope="col">Instance</th><th scope="col"><span class="offscreen">Unpin it</span></th></tr></thead>
            <tbody>${pins.slice(0, 200).map(([name, instance]) => html`<${Row} key=${name} data-testid="pin-row"><th scope="row"><${TopicLink} name=${name} /></th><td>${instance}</td>
              <td class="actions"><${Guarded} app=${app} verb="operate" on="service" data-testid="unpin" onClick=${this.unpin(name)}>Unpin …</${Guarded}></td></${Row}>`)}</tbody></table></${TableFrame}>`}
          <form class="fields" onSubmit=${(event) => event.preventDefault()}>
            <label>Topic<input ref=${this.topic} data-testid="pin-topic" placeholder="namespace:topic" spellcheck="false" disabled=${alone} /></label>
            <label>Instance<select ref=${this.instance} data-testid="pin-instance" disabled=${alone}>${cluster.instances.map((each) => html`<${Option} value=${each.name} />`)}</select></label>
            <p class="buttons start"><${Guarded} app=${app} verb="operate" on="service" data-testid="pin" disabled=${alone} title=${locked} onClick=${this.pin()}>Pin …</${Guarded}></p>
          </form>
        </section>
        ${scrub && html`<${Scrub} app=${app} scrub=${scrub} now=${at} start=${this.scrub()} aside=${(each) => () => setAside(app, each.namespace, each.topic, each.from, each.to, () => this.refresh()).catch((error) => this.refused(error))} />`}`}`;
  }
}

const ROUNDS = { off: "it runs only on request", waiting: "it waits for its next round", running: "it is running", stopped: "it stopped, and will be tried again" };

// The state and findings of the scrub on the instance that answers.
function Scrub({ app, scrub, now, start, aside }) {
  const { state, findings, moreFindings, lastCompleteMs, rows, bytes: size } = scrub;
  const done = lastCompleteMs === null ? "No round has ended since the start." : `The last round ended ${duration(now - lastCompleteMs)} ago.`;
  return html`<section aria-labelledby="scrub-title" data-testid="scrub"><div class="head"><h2 id="scrub-title">Scrub</h2>
      <${Guarded} app=${app} verb="operate" on="service" data-testid="scrub-start" disabled=${state === "running"} title=${state === "running" ? "a scrub is running" : undefined} onClick=${start}>Scrub now …</${Guarded}></div>
    <p class="muted">The scrub reads and checks every row of this instance: ${ROUNDS[state] ?? state}${state === "running" ? `, ${many(rows, "row")} (${bytes(size)}) so far` : ""}. ${done}${findings.length === 0 && lastCompleteMs !== null ? " It found nothing damaged." : ""}</p>
    ${findings.length > 0 &&
    html`<${TableFrame} label="Damaged places"><table><caption class="offscreen">Damaged places</caption>
      <thead><tr><th scope="col">Topic</th><th scope="col">Table</th><th scope="col" class="number">Rows</th><th scope="col">Why</th><th scope="col">Place</th><th scope="col"><span class="offscreen">Mend it</span></th></tr></thead>
      <tbody>${findings.slice(0, MOST_FINDINGS).map((each) => html`<${Row} key=${`${each.table} ${each.from}`} data-testid="finding-row">
        <th scope="row">${each.namespace ? html`<${TopicLink} name=${`${each.namespace}:${each.topic}`} />` : "no topic"}</th><td>${each.table}</td>
        <td class="number">${count(each.rows)}</td><td class="bad wrapped" title=${each.file ?? null}>${each.why}</td>
        <td><code class="id">${each.from}</code>${each.to !== each.from && html`<br /><code class="id">${each.to}</code>`}</td>
        <td class="actions">${each.topic && each.table === "message" && html`<${Guarded} app=${app} verb="admin" on=${`${each.namespace}:${each.topic}`} data-testid="set-aside" onClick=${aside(each)}>Set aside …</${Guarded}>`}</td></${Row}>`)}</tbody></table></${TableFrame}>
      ${(findings.length > MOST_FINDINGS || moreFindings > 0) && html`<p class="muted">and ${count(Math.max(0, findings.length - MOST_FINDINGS) + moreFindings)} more</p>`}`}
  </section>`;
}

// Return the body of /readyz; for an answer with status 503, a body made from its error.
async function readiness() {
  try {
    return await get("/readyz");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return { ready: false, reasons: [{ code: error.code, detail: error.message }] };
  }
}
