// The frame around all pages: navigation, the user's name, the connection, keys, confirmations.

import { get, onUnauthenticated, Problem, token } from "./api.js";
import { clock } from "./format.js";
import { Live } from "./live.js";
import { Audit } from "./pages/audit.js";
import { Cluster } from "./pages/cluster.js";
import { Lineage } from "./pages/lineage.js";
import { Overview } from "./pages/overview.js";
import { Producers } from "./pages/producers.js";
import { Topic } from "./pages/topic.js";
import { Transactions } from "./pages/transactions.js";
import { Component, Confirm, Dialog, Option, createRef, go, goQuery, here, html, onMove, render } from "./ui.js";

const PAGES = { overview: Overview, topics: Topic, transactions: Transactions, producers: Producers, cluster: Cluster, audit: Audit, lineage: Lineage };
const NAV = [
  ["overview", "Overview", "/console"],
  ["transactions", "Transactions", "/console/transactions"],
  ["cluster", "Cluster", "/console/cluster"],
  ["audit", "Audit", "/console/audit"],
  ["lineage", "Lineage", "/console/lineage"],
];
const KEYS = [
  ["/", "go to the filter"],
  ["j  k", "next and previous row"],
  ["Enter", "open the row"],
  ["Esc", "close the open row or dialog, or go back"],
  ["r", "refresh"],
  ["?", "this list"],
];
const TOAST_MS = 6000;
// Minimum interval between two announcements to screen readers.
const POLITE_MS = 5000;
// Pause before whoami is requested again after no answer.
const WHO_MS = 2000;

class App extends Component {
  constructor() {
    super();
    this.state = { route: here(), who: null, login: false, why: "", toast: "", polite: "", help: false, question: null, theme: document.documentElement.dataset.theme };
    this.live = new Live(() => this.connectionChanged());
    this.politeAt = 0;
  }

  componentDidMount() {
    onMove(() => this.moved());
    window.addEventListener("popstate", () => this.moved());
    document.addEventListener("click", (event) => this.onClick(event));
    document.addEventListener("keydown", (event) => this.onKey(event));
    onUnauthenticated((problem) => this.askForToken(token.get() ? problem.detail || "the token was refused" : ""));
    this.learnWho();
  }

  moved() {
    const before = this.state.route.key;
    const route = here();
    this.setState({ route, question: null, help: false }, () => {
      if (before === route.key) return;
      window.scrollTo(0, 0);
      document.querySelector("main h1")?.focus();
    });
  }

  async learnWho() {
    const asked = token.get();
    try {
      const who = await get("/v1/whoami");
      // The user may have logged out, or in under another name, since the request.
      if (asked === token.get()) this.setState({ who, login: false });
    } catch (error) {
      if (error instanceof Problem && error.status === 404) this.setState({ who: { name: "anonymous", via: "open", grants: null } });
      else if (!(error instanceof Problem)) setTimeout(() => this.learnWhoOnceSeen(), WHO_MS);
    }
  }

  learnWhoOnceSeen() {
    if (document.visibilityState !== "hidden") this.learnWho();
    else document.addEventListener("visibilitychange", () => this.learnWhoOnceSeen(), { once: true });
  }

  // True if the user has the verb on `namespace:topic`, `namespace:*` or `service`. The daemon decides;
  // this only disables buttons that it would refuse.
  may(verb, on) {
    const grants = this.state.who?.grants;
    if (!grants) return true;
    return grants.some(({ verbs, on: patterns }) => (verbs.includes(verb) || verbs.includes("all")) && patterns.some((pattern) => covers(pattern, on)));
  }

  // --- announcements -------------------------------------------------------------------------------

  connectionText() {
    if (this.live.word === "away") return `disconnected since ${clock(this.live.since)}`;
    return this.live.word;
  }

  connectionChanged() {
    document.documentElement.dataset.connection = this.live.word;
    this.forceUpdate();
    if (this.live.word !== "paused") this.politely(this.live.word === "away" ? "The daemon does not answer." : "Connected.");
  }

  say(toast) {
    this.setState({ toast });
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => this.setState({ toast: "" }), TOAST_MS);
    this.politely(toast);
  }

  politely(text) {
    clearTimeout(this.politeTimer);
    const wait = Math.max(0, this.politeAt + POLITE_MS - Date.now());
    this.politeTimer = setTimeout(() => {
      this.politeAt = Date.now();
      this.setState({ polite: text });
    }, wait);
  }

  confirm(question) {
    this.setState({ question });
  }

  // --- keys and links ------------------------------------------------------------------------------

  onClick(event) {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = event.target.closest?.("a[href^='/console']");
    if (!link || link.target) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target.matches?.("input:not([type=range]), textarea, select");
    if (event.key === "Escape") {
      if (typing) event.target.blur();
      else this.back();
    }
    if (typing) return;
    const done = {
      "/": () => document.querySelector("[data-filter]")?.focus(),
      "?": () => this.setState({ help: true }),
      j: () => this.step(1),
      k: () => this.step(-1),
      r: () => this.refresh(),
    }[event.key];
    if (!done) return;
    event.preventDefault();
    done();
  }

  step(by) {
    const rows = [...document.querySelectorAll("[data-row]")];
    const at = rows.indexOf(document.activeElement.closest("[data-row]"));
    rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? 0 : at + by))]?.focus();
  }

  back() {
    const { route } = this.state;
    if (route.query.has("open")) goQuery({ open: null });
    else if (route.page === "producers") go(`/console/topics/${route.ns}/${route.topic}`);
    else if (route.page !== "overview") go("/console");
  }

  refresh() {
    this.live.restart();
    this.learnWho();
  }

  setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("plainsong-theme", theme);
    } catch {
      // Without storage, the choice lasts as long as the page.
    }
    this.setState({ theme });
  }

  logout() {
    token.clear();
    this.askForToken("");
  }

  // The connection is "paused", not "away": the daemon answers, and nothing is followed until the user has logged in.
  askForToken(why) {
    this.setState({ who: null, login: true, why });
    this.live.rest();
  }

  render(_, { route, who, login, why, toast, polite, help, question, theme }) {
    const Shown = PAGES[route.page];
    return html`<div class="frame">
      <a class="skip" href="#main">Skip to content</a>
      <header>
        <a class="brand" href="/console">Plainsong</a>
        <nav data-testid="nav" aria-label="Pages">
          ${NAV.map(([page, label, path]) => html`<a href=${path} data-testid=${`nav-${page}`} aria-current=${route.page === page ? "page" : null}>${label}</a>`)}
        </nav>
        <div class="tools">
          <span class="connection" data-testid="connection" data-word=${this.live.word}>${this.connectionText()}</span>
          <button type="button" data-testid="refresh" title="Refresh (r)" onClick=${() => this.refresh()}>Refresh</button>
          <button type="button" data-testid="help" aria-label="Keys" title="Keys (?)" onClick=${() => this.setState({ help: true })}>?</button>
          <label class="theme"><span class="offscreen">Theme</span>
            <select data-testid="theme" title="Theme" value=${theme} onChange=${(event) => this.setTheme(event.currentTarget.value)}>
              ${["auto", "light", "dark"].map((each) => html`<${Option} value=${each} chosen=${theme} />`)}
            </select>
          </label>
          <span class="who" data-testid="who" title=${who?.name ? `${who.name}${who.via ? `, by ${who.via}` : ""}` : ""}>${who?.name ?? ""}</span>
          ${token.get() && !login && html`<button type="button" data-testid="logout" onClick=${() => this.logout()}>Log out</button>`}
        </div>
      </header>
      <main id="main" tabindex="-1">
        ${login
          ? html`<${Login} why=${why} entered=${() => this.learnWho()} />`
          : Shown
            ? html`<${Shown} key=${route.key} app=${this} route=${route} />`
            : html`<h1 tabindex="-1">Page not found</h1><p><a href="/console">Go to the overview</a></p>`}
      </main>
      <div class="toast" data-testid="toast">${toast}</div>
      <div class="offscreen" role="status" aria-live="polite">${polite}</div>
      ${help && html`<${Help} close=${() => this.setState({ help: false })} />`}
      ${question && html`<${Confirm} question=${question} close=${() => this.setState({ question: null })} />`}
    </div>`;
  }
}

// True if a grant's pattern covers `on`. Each part is exact or a prefix and a star; no star covers the namespace system.
export function covers(pattern, on) {
  if (pattern === on) return true;
  const [patternNs, patternTopic] = pattern.split(":");
  const [ns, topic] = on.split(":");
  if (topic === undefined || patternTopic === undefined) return false;
  const fits = (each, name) => each === name || (each.endsWith("*") && name.startsWith(each.slice(0, -1)));
  if (ns === "system" && patternNs !== "system") return false;
  return fits(patternNs, ns) && fits(patternTopic, topic);
}

class Login extends Component {
  field = createRef();

  constructor() {
    super();
    this.state = { typed: "", error: "" };
  }

  componentDidMount() {
    this.field.current.focus();
  }

  async submit() {
    const pasted = this.state.typed.trim();
    token.set(pasted);
    try {
      await get("/v1/whoami");
      this.props.entered();
    } catch (error) {
      // Another token may have been pasted since the request.
      if (token.get() !== pasted) return;
      token.clear();
      this.setState({ error: error.message });
    }
  }

  render({ why }, { typed, error }) {
    return html`<form
      class="login"
      onSubmit=${(event) => {
        event.preventDefault();
        this.submit();
      }}
    >
      <h1 tabindex="-1">Log in</h1>
      <p>This daemon requires authentication. Paste a token; <code>plainsong token create</code> creates one. Only this tab stores it.</p>
      <label>Token<input ref=${this.field} data-testid="login-token" type="password" autocomplete="off" spellcheck="false" value=${typed} onInput=${(event) => this.setState({ typed: event.currentTarget.value })} /></label>
      <p class="buttons"><button type="submit" class="primary" data-testid="login-submit" disabled=${!typed.trim()}>Log in</button></p>
      ${(error || why) && html`<p class="error" role="status" data-testid="login-error">${error || why}</p>`}
    </form>`;
  }
}

function Help({ close }) {
  return html`<${Dialog} title="Keys" close=${close} data-testid="help-dialog">
    <dl class="keys">${KEYS.map(([key, does]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${does}</dd></div>`)}</dl>
    <p class="buttons"><button type="button" onClick=${close}>Close</button></p>
  </${Dialog}>`;
}

render(html`<${App} />`, document.getElementById("app"));
