// Problems that need attention, worst first, each with its subject, reason and remedy.

import { duration, time } from "../format.js";
import { html, transactionUrl } from "../ui.js";

const TODO = {
  "held-reader": "Find its client, or abort it there.",
  "old-transaction": "Find its client, or abort it.",
  "expired-unread": "Check whether the reader is still running; a longer ttl gives it more time.",
  disk: "Free some disk space, or shorten a ttl.",
  "low-space": "Free some disk space, or shorten a ttl.",
  "slow-sync": "Check what else uses the disk, and whether the disk is failing.",
  certificate: "Renew the certificate: the daemon loads the new one without a restart.",
  reload: "Correct the file; until then the previous one stays in force.",
  audit: "Find out why system:audit cannot be written.",
  damaged: "Set the damaged rows aside so that readers can continue; a backup may have the lost messages.",
  unread: "Check whether this part of the store answers; the scrub tries again every hour.",
  replication: "Check the object store, and the daemon's log.",
  clock: "Correct the clock, or wait until it catches up.",
  instance: "Check whether it is running, and whether the other instances can reach it.",
};
const POINTER = /^(Transaction )(\d{16,19})(.*)$/s;

const own = (link) => typeof link === "string" && link.startsWith("/console");

// Links the transaction that a text names.
function Why({ text }) {
  const [, before, id, rest] = POINTER.exec(text) ?? [];
  return id ? html`${before}<a href=${transactionUrl(id)}>${id}</a>${rest}` : text;
}

export function Attention({ items, now, about }) {
  if (!items || (about && !items.length)) return null;
  if (items.length === 0) return html`<p class="calm" data-testid="attention">Nothing needs attention.</p>`;
  return html`<section aria-labelledby="attention-title" data-testid="attention">
    <h2 id="attention-title">Needs attention</h2>
    <ul class="attention">${items.map((each) => html`<li key=${`${each.kind} ${each.subject} ${each.text}`} class=${each.severity} data-testid="attention-item" data-kind=${each.kind} data-severity=${each.severity}>
      <span class=${`state ${each.severity === "critical" ? "bad" : "warn"}`}>${each.severity}</span>
      <span>${!about && html`${subject(each)} `}<${Why} text=${each.text} />. <span class="muted todo">${TODO[each.kind]}</span></span>
      <span class="muted" title=${each.sinceMs ? time(each.sinceMs) : null}>${each.sinceMs ? `for ${duration(now - each.sinceMs)}` : ""}</span>
    </li>`)}</ul>
  </section>`;
}

// The name of a single instance is empty.
function subject({ kind, subject: named, link }) {
  const subject = named || "this instance";
  const to = own(link) ? link : kind === "damaged" ? "/console/cluster" : null;
  return to ? html`<a href=${to}>${subject}</a>` : html`<strong>${subject}</strong>`;
}
