// Formats numbers, times, bytes and payloads, and parses them. Nothing here touches the page.

// Keeps a number and its unit on one line.
const GAP = "\u00a0";
const GROUPED = new Intl.NumberFormat("en-US");

export const count = (value, estimated) => (value == null ? "–" : (estimated ? `≤${GAP}` : "") + GROUPED.format(value));

export const rate = (value) => (value == null ? "–" : value === 0 ? "0" : value < 10 ? value.toFixed(1) : GROUPED.format(Math.round(value)));

export function bytes(value, estimated) {
  if (value == null) return "–";
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < 4) {
    size /= 1024;
    unit += 1;
  }
  const text = unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1);
  return `${estimated ? `≤${GAP}` : ""}${text}${GAP}${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function duration(ms) {
  if (ms == null) return "–";
  const s = Math.max(0, Math.round(ms / 1000));
  const [d, h, m] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (d > 0) return h > 0 ? `${d}${GAP}d ${h}${GAP}h` : `${d}${GAP}d`;
  if (h > 0) return m > 0 ? `${h}${GAP}h ${m}${GAP}min` : `${h}${GAP}h`;
  if (m > 0) return s % 60 > 0 && m < 10 ? `${m}${GAP}min ${s % 60}${GAP}s` : `${m}${GAP}min`;
  return `${s}${GAP}s`;
}

const two = (value) => String(value).padStart(2, "0");

export function time(ms, millis = false) {
  if (ms == null) return "–";
  const at = new Date(Number(ms));
  if (Number.isNaN(at.getTime())) return String(ms);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return `${day} ${clock}${millis ? `.${String(at.getMilliseconds()).padStart(3, "0")}` : ""}`;
}

export const clock = (ms) => time(ms).slice(11);

export const many = (n, one, more = `${one}s`) => `${typeof n === "number" ? GROUPED.format(n) : n} ${n === 1 ? one : more}`;

// --- JSON -------------------------------------------------------------------------------------------

const LONG = /"(?:\\.|[^"\\])*"|(?<![\d.eE+-])-?\d{16,}(?![\d.eE])/g;

// Parse an answer of the daemon. Ids and pointers exceed 2^53, so integers of 16 digits or more become strings.
export const parse = (text) => JSON.parse(text.replace(LONG, (found) => (found[0] === '"' ? found : `"${found}"`)));

const TOKEN = /"(?:\\[\s\S]|[^"\\])*"?|[{}[\],:]|[^\s{}[\],:"]+/g;

// Indent a JSON payload; numbers, strings and the order of keys stay as written. A truncated payload is shown up to the
// cut. Null if it is not JSON.
export function indent(text, cut = false) {
  if (!/^\s*[[{"\dtfn-]/.test(text)) return null;
  if (!cut) {
    try {
      JSON.parse(text);
    } catch {
      return null;
    }
  }
  const lines = [];
  let line = "";
  let depth = 0;
  let last = "";
  const next = () => {
    lines.push(line);
    line = "  ".repeat(depth);
  };
  for (const [token] of text.matchAll(TOKEN)) {
    const closes = token === "}" || token === "]";
    if (closes) depth = Math.max(0, depth - 1);
    if ((last === "{" || last === "[") && !closes) next();
    if (closes && last !== "{" && last !== "[") next();
    line += token === ":" ? ": " : token;
    if (token === "{" || token === "[") depth += 1;
    if (token === ",") next();
    last = token;
  }
  lines.push(line);
  return lines.join("\n");
}

// --- bytes ------------------------------------------------------------------------------------------

export function fromBase64(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) found[i] = raw.charCodeAt(i);
  return found;
}

// Decode UTF-8; null if it is invalid. A truncated payload may end inside a character.
export function asText(data, cut = false) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data, { stream: cut });
  } catch {
    return null;
  }
}

// Control characters of bidirectional text would display a payload in a different order.
const DIRECTION = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

export const visible = (text) => text.replace(DIRECTION, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

export const HEX_PAGE = 4096;

export function hex(data, from, to) {
  const lines = [];
  for (let at = from; at < Math.min(to, data.length); at += 16) {
    const row = data.subarray(at, Math.min(at + 16, to));
    const digits = Array.from(row, (each) => each.toString(16).padStart(2, "0"));
    const left = digits.slice(0, 8).join(" ").padEnd(23);
    const right = digits.slice(8).join(" ").padEnd(23);
    const shown = Array.from(row, (each) => (each > 31 && each < 127 ? String.fromCharCode(each) : ".")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${left}  ${right}  ${shown}`);
  }
  return lines.join("\n");
}

// --- ids --------------------------------------------------------------------------------------------

export const timeOfId = (id) => Number(BigInt(`0x${id.slice(0, 16)}`));

export const idAfter = (id) => (BigInt(`0x${id}`) + 1n).toString(16).padStart(40, "0");

// Parse an id, a time in milliseconds, a date, a time of day or an age ("15m", "2h"); null if it is none of them.
export function position(text, now = Date.now()) {
  const asked = text.trim();
  if (/^[0-9a-fA-F]{40}$/.test(asked)) return asked.toLowerCase();
  if (/^\d{1,19}$/.test(asked)) return asked;
  const ago = /^-?(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)(?: ago)?$/.exec(asked);
  if (ago) {
    const unit = { ms: 1, s: 1000, m: 60000, min: 60000, h: 3600000, d: 86400000 }[ago[2]];
    return String(Math.max(0, Math.round(now - Number(ago[1]) * unit)));
  }
  const clockOnly = /^(\d{1,2}):(\d{2})(?::(\d{2}))?$/.exec(asked);
  if (clockOnly) {
    const at = new Date(now);
    at.setHours(Number(clockOnly[1]), Number(clockOnly[2]), Number(clockOnly[3] ?? 0), 0);
    return String(at.getTime());
  }
  const at = new Date(asked.includes("T") ? asked : asked.replace(" ", "T")).getTime();
  return Number.isNaN(at) || at < 0 ? null : String(at);
}
