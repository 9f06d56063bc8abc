// The second copy of the store, on the overview: its lag, and the earliest time to which it can be restored.

import { get, now, optional } from "../api.js";
import { bytes, count, duration, time } from "../format.js";
import { Component, Stat, html } from "../ui.js";

const POLL_MS = 3000;

export class SecondCopy extends Component {
  componentDidMount() {
    this.load();
    this.timer = setInterval(() => this.follow(), POLL_MS);
  }

  componentDidUpdate(previous) {
    if (previous.attention !== this.props.attention) this.follow();
  }

  componentWillUnmount() {
    this.gone = true;
    clearInterval(this.timer);
  }

  // A daemon that was started without a copy never gets one, so only a primary's figures are loaded again.
  follow() {
    if (this.state.copy?.role === "primary" && this.props.app.live.word === "live") this.load();
  }

  async load() {
    if (!this.props.app.may("inspect", "service")) return;
    const copy = await optional(get("/v1/replication")).catch(() => null);
    if (copy && !this.gone) this.setState({ copy, at: now() });
  }

  render({}, { copy, at }) {
    if (!copy || copy.role === "none") return null;
    const ago = (ms) => (ms === null ? "never" : `${duration(at - ms)} ago`);
    const behind = copy.lagCommits ? `${count(copy.lagCommits)} commits, ${bytes(copy.lagBytes)}, ${duration(copy.lagMs)}` : "nothing";
    const names = copy.standbys.map((each) => each.holder || "unnamed").join(", ");
    const standbys = names ? `${names}, ${copy.automatic ? "automatic" : "by hand"}` : "none";
    const restorable = copy.countedCommit === null ? "not yet" : copy.oldestMs === null ? "yes" : `from ${time(copy.oldestMs)}`;
    return html`<section aria-labelledby="copy-title" data-testid="copy"><h2 id="copy-title">Second copy</h2>
      <dl class="stats">
        <${Stat} id="copy-role" label="This daemon" value=${`${copy.role}, epoch ${copy.epoch}`} />
        <${Stat} id="copy-to" label="Copy" value=${`${copy.to}, ${copy.mode}`} />
        <${Stat} id="copy-commit" label="Last commit" value=${count(copy.lastCommit)} />
        <${Stat} id="copy-lag" label="Behind" value=${behind} />
        <${Stat} id="copy-upload" label="Last upload" value=${copy.error ?? ago(copy.uploadedMs)} />
        <${Stat} id="copy-base" label="Last base" value=${ago(copy.baseMs)} />
        <${Stat} id="copy-standbys" label="Standbys" value=${standbys} />
        <${Stat} id="copy-restorable" label="Can be restored" value=${restorable} />
      </dl>
    </section>`;
  }
}
