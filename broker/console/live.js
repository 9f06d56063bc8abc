// What keeps a page up to date: one stream of events, closed while nobody looks, opened again when the daemon is back.

import { Away, Problem, events } from "./api.js";

const PAUSES_S = [1, 2, 4, 8, 15];
// The daemon pings every 15 s: a stream that is silent for longer is dead.
const SILENCE_MS = 40000;
// Of a daemon that has no stream for what the page shows.
const POLL_MS = 3000;

export class Live {
  constructor(changed) {
    this.changed = changed;
    this.word = "paused";
    this.since = null;
    this.page = null;
    this.lastId = null;
    // What the stream that is there was asked for.
    this.asked = null;
    this.tries = 0;
    document.addEventListener("visibilitychange", () => this.restart());
    window.addEventListener("online", () => this.restart());
  }

  // The page that is shown, which says what it is about and takes events.
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

  // What the page is about, which it has loaded, may be other things than the stream was asked for.
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

  // Nothing is followed until a page attaches again.
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

  // A call of a page found nobody: the stream will find out too, but later.
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

  // Who answers but for the stream, as behind a proxy that waits for its end, is asked again and again instead.
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
        return; // away, which the page has said
      }
      if (!signal.aborted && this.word === "live") this.poll(page, signal);
    }, POLL_MS);
  }
}
