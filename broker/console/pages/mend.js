// Restores deleted topics, and sets unreadable rows aside.

import { topicPath } from "../api.js";
import { many } from "../format.js";
import { carryOut, effectLines, preview, said } from "../preview.js";

// Undelete a topic after a preview, in the previewed generation.
export async function undelete(app, ns, topic, done) {
  const path = topicPath(ns, topic, "undelete");
  const asked = await preview(path, "POST");
  app.confirm({
    title: `Restore ${ns}:${topic}?`,
    lines: [...effectLines(asked), "The messages are unchanged, and keep their ids."],
    action: "Undelete",
    harmless: true,
    run: async () => {
      const back = await carryOut(path, "POST", { etag: asked.etag });
      app.say(said(`${ns}:${topic} was restored`, back));
      await done();
    },
  });
}

// Set unreadable rows of a topic aside, so that readers get past them; the daemon keeps the rows in a file.
export async function setAside(app, ns, topic, from, to, done) {
  const path = topicPath(ns, topic, "set-aside");
  const body = { from, to };
  const asked = await preview(path, "POST", body);
  app.confirm({
    title: `Set rows of ${ns}:${topic} aside?`,
    lines: [
      from === to ? `The row at ${from}.` : `From ${from} to ${to}.`,
      ...effectLines(asked),
      "Readers skip them from then on. The daemon copies the rows unchanged to a file in its data directory.",
    ],
    action: "Set aside",
    run: async () => {
      const kept = await carryOut(path, "POST", { body });
      app.say(said(`${many(kept.after.rows ?? "some", "row")} of ${ns}:${topic} set aside in ${kept.after.file}`, {}));
      await done();
    },
  });
}
