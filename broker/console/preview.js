// Previews of changes, and their results, as the daemon reports them: dryRun=true is the same call without effect, and
// its answer has the same fields.

import { ask, now } from "./api.js";
import { bytes, count, duration, many, time } from "./format.js";

export async function preview(path, method, body) {
  const asked = await ask(path, { method, query: { dryRun: true }, body });
  return { ...asked.data, etag: asked.data.etag ?? asked.headers.get("ETag") };
}

// Make the previewed call, and return its result. The daemon refuses it if the target has changed since the preview.
export async function carryOut(path, method, { body, etag } = {}) {
  // Only abort and invalidate need this header to return a body.
  const headers = { Prefer: "return=representation", ...(etag ? { "If-Match": etag } : {}) };
  try {
    return (await ask(path, { method, body, headers })).data;
  } catch (error) {
    if (error.code === "precondition_failed") error.message = "It has changed since the preview; nothing was done.";
    throw error;
  }
}

const some = ({ messages, bytes: size, estimated }) => `${estimated ? "at most " : ""}${many(messages, "message")} (${bytes(size, estimated)})`;

function span({ oldestMs, newestMs }) {
  if (oldestMs == null || newestMs == null) return "";
  const [from, to] = [time(oldestMs), time(newestMs)];
  return from === to ? `, published ${from}` : `, published between ${from} and ${to}`;
}

const MOST_NAMES = 3;

// The first few names, and how many more there are.
export const named = (names, total = names.length) => `${names.slice(0, MOST_NAMES).join(", ")}${total > MOST_NAMES ? ` and ${count(total - MOST_NAMES)} more` : ""}`;

const WOULD = { hides: ["disappears", "disappear"], returns: ["reappears", "reappear"], removes: ["is removed", "are removed"] };

// Describe a preview in sentences; `who` has the known names of the clients that the preview counts.
export function effectLines({ effect = {}, warnings = [] }, who = {}) {
  const lines = [];
  for (const [name, [one, more]] of Object.entries(WOULD)) {
    const found = effect[name];
    if (found?.messages) lines.push(`${some(found)} ${found.messages === 1 ? one : more}${span(found)}.`);
  }
  const lost = (effect.topics ?? []).filter((each) => each.messages > 0);
  if (lost.length) {
    const total = lost.reduce((sum, each) => sum + each.messages, 0);
    const where = lost.length === 1 ? lost[0].topic : `${lost.length} topics: ${lost.map((each) => `${each.topic}\u00a0(${count(each.messages)})`).join(", ")}`;
    lines.push(`${many(total, "message")} ${total === 1 ? "disappears" : "disappear"} from ${where}.`);
  } else if (effect.topics && !effect.topics.some((each) => each.messages === null)) {
    lines.push("It has no messages.");
  }
  if (effect.releases) {
    const { heldPolls, hiddenMessages } = effect.releases;
    if (hiddenMessages) lines.push(`Committed readers continue: ${many(hiddenMessages, "message")} after it ${hiddenMessages === 1 ? "becomes" : "become"} visible.`);
    if (heldPolls) lines.push(`${many(heldPolls, "waiting poll")} ${heldPolls === 1 ? "is" : "are"} answered.`);
    if (who.held?.length) lines.push(`${who.held.length === 1 ? "The waiting reader" : "Waiting readers"}: ${named(who.held)}.`);
    if (!hiddenMessages && !heldPolls && !who.held?.length) lines.push("No reader waits for it.");
  }
  const counts = { readers: "reader", producers: "producer", openTransactions: "open transaction", parkedPolls: "waiting poll" };
  const names = (name) => (who[name]?.length ? ` (${named(who[name], effect[name])})` : "");
  const concerned = Object.keys(counts).filter((name) => effect[name] > 0).map((name) => many(effect[name], counts[name]) + names(name));
  if (concerned.length) lines.push(`It also affects ${concerned.join(", ")}.`);
  if (effect.removed != null) lines.push(effect.removed ? `${many(effect.removed, "transaction")} ${effect.removed === 1 ? "leaves" : "leave"} the list.` : "None of these is on the list.");
  if (effect.moves?.topicsOpen > 0) lines.push(`${many(effect.moves.topicsOpen, "open topic")} ${effect.moves.topicsOpen === 1 ? "moves" : "move"} to other instances.`);
  if (effect.damagedRows) lines.push(`${many(effect.damagedRows, "row")} of them cannot be parsed.`);
  if (effect.unreadable) lines.push(`${many(effect.unreadable, "place")} cannot be read at all.`);
  if (effect.undeleteUntilMs) lines.push(`It can be restored until ${time(effect.undeleteUntilMs)} (${duration(effect.undeleteUntilMs - now())}).`);
  lines.push(...warnings);
  return lines.length ? lines : ["Nothing changes for readers."];
}

// Summarize a result in a few words; empty if nothing changed for readers.
export function outcome({ effect = {}, warnings = [] }) {
  const words = [];
  for (const [name, word] of Object.entries({ hides: "hidden", returns: "back", removes: "removed" })) {
    if (effect[name]?.messages) words.push(`${some(effect[name])} ${word}`);
  }
  const lost = (effect.topics ?? []).reduce((sum, each) => sum + (each.messages ?? 0), 0);
  if (lost) words.push(`${many(lost, "message")} taken away`);
  if (effect.releases?.hiddenMessages) words.push(`${many(effect.releases.hiddenMessages, "message")} released`);
  if (effect.releases?.heldPolls) words.push(`${many(effect.releases.heldPolls, "waiting poll")} answered`);
  if (effect.moves?.topicsOpen) words.push(`${many(effect.moves.topicsOpen, "open topic")} moving to other instances`);
  return [words.join(", "), ...warnings].filter(Boolean).join("; ");
}

export const said = (what, done) => [what, outcome(done ?? {})].filter(Boolean).join(": ");
