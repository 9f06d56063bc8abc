// Keeps a page up to date with one event stream, closed while the page is hidden, reopened when the daemon is back.

import { Away, Problem, events } from "./api.js";

const PAUSES_S = [1, 2, 4, 8, 15];
// The daemon pings every 15 s: a stream that is silent for longer is dead.
const SILENCE_MS = 40000;
// Poll interval for a daemon without an event stream, or behind a proxy that withholds it.
const POLL_MS = 3000;

export class Live {
  constructor(changed) {
    this.changed = changed;
    this.word = "paused";
    this.since = null;
    this.page = null;
    this.lastId = null;
    // The interest that the open stream was requested with, as JSON.
    this.asked = null;
    this.tries = 0;
    document.addEventListener("visibilitychange", () => this.restart());
    window.addEventListener("online", () => this.restart());
  }

  // Follow the page that is shown: its interest() selects events, its onEvent() receives them.
  attach(page) {
    this.page = page;
    this.lastId = null;
    this.restart();
  }

  detach(page) {
    if (this.page !== page) return;
    this.page = null;
    this.stop();
  }

  // Reopen the stream if the data that the page loaded has changed its interest.
  again(page) {
    if (this.page !== page || !this.asked || this.asked === JSON.stringify(page.interest())) return;
    this.stop();
    this.run(page, true);
  }

  stop() {
    clearTimeout(this.timer);
    clearTimeout(this.watch);
    this.abort?.abort();
    this.abort = null;
    this.asked = null;
  }

  restart() {
    this.stop();
    if (document.visibilityState === "hidden") {
      this.say("paused");
    } else if (this.page) {
      this.run(this.page);
    }
  }

  // Stop following until a page attaches again.
  rest() {
    this.stop();
    this.tries = 0;
    this.say("paused");
  }

  say(word) {
    if (word === this.word) return;
    this.since = word === "away" ? Date.now() : null;
    this.word = word;
    this.changed();
  }

  // A page's request could not reach the daemon; the stream would notice it too, but later.
  lost() {
    if (this.word !== "away") this.fail();
  }

  fail() {
    this.stop();
    if (document.visibilityState === "hidden") return;
    this.say("away");
    const pause = PAUSES_S[Math.min(this.tries, PAUSES_S.length - 1)];
    this.tries += 1;
    this.timer = setTimeout(() => this.restart(), pause * 1000);
  }

  answered() {
    this.tries = 0;
    this.say("live");
  }

  heard() {
    clearTimeout(this.watch);
    this.watch = setTimeout(() => this.fail(), SILENCE_MS);
  }

  async run(page, loaded = false) {
    const abort = new AbortController();
    this.abort = abort;
    const { signal } = abort;
    try {
      if (!loaded) await page.refresh();
      if (signal.aborted) return;
      const opened = () => {
        this.answered();
        this.heard();
      };
      const interest = page.interest();
      this.asked = JSON.stringify(interest);
      this.watch = setTimeout(() => this.withheld(page), SILENCE_MS);
      for await (const event of events("/v1/events", interest, { signal, lastId: this.lastId, opened })) {
        if (signal.aborted) return;
        this.heard();
        if (event.id) this.lastId = event.id;
        if (event.name === "end") break;
        if (event.data) page.onEvent(event.name, event.data);
      }
      if (!signal.aborted) this.fail();
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Away) this.fail();
      else if (error instanceof Problem && error.status === 404) this.poll(page, signal);
      else if (!(error instanceof Problem && error.status === 401)) this.fail();
    }
  }

  // The daemon answers, but the stream delivers nothing, as with a proxy that buffers whole responses: poll instead.
  withheld(page) {
    this.stop();
    this.abort = new AbortController();
    this.poll(page, this.abort.signal);
  }

  poll(page, signal) {
    this.answered();
    this.timer = setTimeout(async () => {
      try {
        await page.refresh();
      } catch {
        return; // away; the page has reported it
      }
      if (!signal.aborted && this.word === "live") this.poll(page, signal);
    }, POLL_MS);
  }
}
