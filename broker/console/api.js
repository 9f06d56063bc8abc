// Calls to the daemon. One place for the token, for problems, and for what is known when the daemon is away.

import { parse } from "./format.js";

const TOKEN = "plainsong-token";

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  clear: () => sessionStorage.removeItem(TOKEN),
};

// Ages and deadlines are by the daemon's clock. Its answers say it to a second, and take their time; a browser's that can
// be as near is believed.
const SKEW_MS = 3000;
let ahead = 0;

export const now = () => Date.now() + ahead;

// The daemon has said it between the question and the end of the answer.
function learnTime(answer, askedMs) {
  const said = Date.parse(answer.headers.get("Date") ?? "");
  if (Number.isNaN(said)) return;
  const answeredMs = Date.now();
  ahead = said < askedMs - SKEW_MS ? said - askedMs : said > answeredMs + SKEW_MS ? said - answeredMs : 0;
}

// The daemon has answered, and refused.
export class Problem extends Error {
  constructor({ status, headers }, body) {
    super(body.detail || body.title || `the answer was ${status}`);
    this.status = status;
    // When to ask again, where the daemon says so.
    this.retryMs = 1000 * headers.get("Retry-After");
    this.code = body.code || "";
    this.hint = body.hint || "";
    this.outcome = body.outcome || "";
    this.requestId = headers.get("X-Request-Id");
  }
}

// The daemon has not answered: it is away, or the way to it is.
export class Away extends Error {}

// A connection may have died without anybody's saying so: a call in which nothing comes for so long has failed.
const SILENCE_MS = 60000;

// `signal` ends a call after such a silence; `heard` is called for whatever comes, `done` at the end.
function untilSilent() {
  const call = new AbortController();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => call.abort(), SILENCE_MS);
  };
  heard();
  return { signal: call.signal, heard, done: () => clearTimeout(timer) };
}

// All of an answer's body.
async function bodyOf(answer, heard) {
  const chunks = [];
  const reader = answer.body?.getReader();
  for (let read = await reader?.read(); read && !read.done; read = await reader.read()) {
    heard();
    chunks.push(read.value);
  }
  return new Uint8Array(await new Blob(chunks).arrayBuffer());
}

let unauthenticated = () => {};
export const onUnauthenticated = (handler) => {
  unauthenticated = handler;
};

export function pathOf(...parts) {
  return `/v1/${parts.map(encodeURIComponent).join("/")}`;
}

export const topicPath = (ns, topic, ...rest) => pathOf("namespaces", ns, "topics", topic, ...rest);

export async function ask(path, { method = "GET", query = {}, body, headers = {}, raw = false } = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value != null && value !== ""));
  const sent = { Accept: raw ? "application/octet-stream" : "application/json", ...headers };
  const secret = token.get();
  if (secret) sent.Authorization = `Bearer ${secret}`;
  const askedMs = Date.now();
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const call = untilSilent();
  let answer;
  let content;
  try {
    answer = await fetch(asked.size ? `${path}?${asked}` : path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: call.signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
    call.heard();
    const data = await bodyOf(answer, call.heard);
    if (raw && answer.ok) return { data, headers: answer.headers };
    content = new TextDecoder().decode(data);
  } catch (error) {
    throw new Away("the daemon does not answer", { cause: error });
  } finally {
    call.done();
  }
  learnTime(answer, askedMs);
  if (!answer.ok) {
    let problem = {};
    try {
      problem = parse(content);
    } catch {
      // Not from the daemon: a proxy's page, say. The status is all there is.
    }
    // Of a token that was changed meanwhile it says nothing any more.
    if (answer.status === 401 && secret === token.get()) unauthenticated(problem);
    throw new Problem(answer, problem);
  }
  return { data: content ? parse(content) : null, headers: answer.headers };
}

export const get = async (path, query) => (await ask(path, { query })).data;

// What may be refused, or not be there; null: it was.
export async function optional(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error instanceof Problem) return null;
    throw error;
  }
}

// Events of one stream, one after the other. EventSource cannot send a token, and a token in a URL would leak.
export async function* events(path, query, { signal, lastId, opened }) {
  const headers = { Accept: "text/event-stream" };
  const secret = token.get();
  if (secret) headers.Authorization = `Bearer ${secret}`;
  if (lastId) headers["Last-Event-ID"] = lastId;
  let answer;
  try {
    answer = await fetch(`${path}?${new URLSearchParams(query)}`, { headers, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Away("the daemon does not answer", { cause: error });
  }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    if (answer.status === 401 && secret === token.get()) unauthenticated(problem);
    throw new Problem(answer, problem);
  }
  opened();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { name: "message", data: "", id: null };
        for (const line of block.split(/\r?\n/)) {
          const [, field, text] = /^([^:]*):? ?([\s\S]*)$/.exec(line);
          if (field === "event") event.name = text;
          if (field === "data") event.data += event.data ? `\n${text}` : text;
          if (field === "id") event.id = text;
        }
        if (event.data) event.data = parse(event.data);
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Away("the stream was cut off", { cause: error });
  } finally {
    reader.cancel().catch(() => {});
  }
}
