// What a change would do: the daemon says so when the same call has dryRun=true, which changes nothing. Of calls that have
// no dry run, the console counts from what the other routes show.

import { Problem, ask, get, now } from "./api.js";

export async function preview(app, method, path, body) {
  try {
    const asked = await ask(path, { method, query: { dryRun: true }, body });
    return { ...asked.data, etag: asked.data.etag ?? asked.headers.get("ETag") };
  } catch (error) {
    if (!(error instanceof Problem && error.code === "invalid_parameter" && /dryRun|query param/.test(error.message))) throw error;
    return counted(method, path, body);
  }
}

async function counted(method, path, body) {
  const topic = /^(.*\/topics\/[^/]+)(\/properties)?$/.exec(path);
  if (topic && method === "DELETE") {
    const stats = await get(`${topic[1]}/stats`);
    const readers = await get(`${topic[1]}/readers`);
    const { messages, bytes, estimated, producers, openTransactions, parkedPolls } = stats;
    return { effect: { removes: { messages, bytes, estimated }, readers: readers.length, producers, openTransactions, parkedPolls } };
  }
  if (topic?.[2]) {
    const { properties } = await get(topic[1]);
    const changed = Object.keys({ ...properties, ...body }).filter((name) => name !== "generation" && String(body[name] ?? "") !== String(properties[name] ?? ""));
    const effect = {};
    if (body.ttl && body.ttl < Number(properties.ttl)) {
      const { data } = await ask(`${topic[1]}/offsets`, { method: "POST", body: { start: 0, end: now() - body.ttl * 1000 } });
      effect.hides = { messages: data.count, bytes: data.bytes, estimated: false };
    }
    return { changed, effect };
  }
  const transaction = /^(\/v1\/transactions\/\d+)\/(abort|invalidate)$/.exec(path);
  if (transaction) {
    const { topics, hiddenMessages } = await get(transaction[1], { longs: "string" });
    return { effect: {}, warnings: [`Messages in ${topics.length} topics disappear (${topics.join(", ") || "none"}); up to ${hiddenMessages} messages are hidden from committed readers until then.`] };
  }
  return { effect: {} };
}
