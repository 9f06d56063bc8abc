// Calls to the daemon, with the token, its problems, its clock, and whether it can be reached.

import { parse } from "./format.js";

const TOKEN = "plainsong-token";

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  clear: () => sessionStorage.removeItem(TOKEN),
};

// Ages and deadlines follow the daemon's clock. Its Date header has whole seconds and takes time to arrive, so the
// browser's clock is used if the two are this close.
const SKEW_MS = 3000;
let ahead = 0;

export const now = () => Date.now() + ahead;

// The daemon set the header between the request and the end of the answer.
function learnTime(answer, askedMs) {
  const said = Date.parse(answer.headers.get("Date") ?? "");
  if (Number.isNaN(said)) return;
  const answeredMs = Date.now();
  ahead = said < askedMs - SKEW_MS ? said - askedMs : said > answeredMs + SKEW_MS ? said - answeredMs : 0;
}

// The daemon answered with an error.
export class Problem extends Error {
  constructor({ status, headers }, body) {
    super(body.detail || body.title || `the daemon answered with status ${status}`);
    this.status = status;
    // From Retry-After; 0 if the daemon sent none.
    this.retryMs = 1000 * headers.get("Retry-After");
    this.code = body.code || "";
    this.hint = body.hint || "";
    this.outcome = body.outcome || "";
    this.requestId = headers.get("X-Request-Id");
  }
}

// The daemon did not answer: it is down or cannot be reached.
export class Away extends Error {}

// A connection may die unnoticed, so a call fails after this long without a byte.
const SILENCE_MS = 60000;

// `signal` aborts a call after that silence; call `heard` when data arrives, and `done` at the end.
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

// Read the whole body of an answer.
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
      // Not from the daemon, but a proxy's error page, for example: only the status is known.
    }
    // A 401 for a token that has since been replaced does not concern the new one.
    if (answer.status === 401 && secret === token.get()) unauthenticated(problem);
    throw new Problem(answer, problem);
  }
  return { data: content ? parse(content) : null, headers: answer.headers };
}

export const get = async (path, query) => (await ask(path, { query })).data;

// Return the answer's data; null if the daemon refused.
export async function optional(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error instanceof Problem) return null;
    throw error;
  }
}

// Yield the events of one stream in order. EventSource cannot send a token, and a token in a URL would leak.
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
