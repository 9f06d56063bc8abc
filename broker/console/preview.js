// What a change would do, as the daemon itself says: the same call with dryRun=true, which changes nothing.

import { ask } from "./api.js";

export async function preview(app, method, path, body) {
  const asked = await ask(path, { method, query: { dryRun: true }, body });
  return { ...asked.data, etag: asked.data.etag ?? asked.headers.get("ETag") };
}
