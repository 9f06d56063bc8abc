"""The audit's page when few of many records match."""

from __future__ import annotations

from tests.console.screen import Screen

#: Answers like a daemon that has read many records without a match, and returns where it stopped.
SCRIPT = """const real = window.fetch;
window.fetch = async (path, more) => {
  if (path.startsWith("/v1/events")) return new Response("{}", {status: 404});
  if (!path.startsWith("/v1/namespaces/system/topics/audit/messages")) return real(path, more);
  const first = !new URLSearchParams(path.split("?")[1]).has("to");
  const headers = {"Content-Type": "application/json", "Plainsong-End": first ? "more" : "end"};
  return new Response("[]", {headers: first ? {...headers, "Plainsong-Last-Id": "00ab".padEnd(40, "0")} : headers});
};"""


def test_a_text_not_found_yet_is_searched_in_older_records(screen: Screen):
    added = screen.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SCRIPT})
    try:
        screen.open("/console/audit?filter=mine", "audit-empty")
        screen.says("audit-empty", "among those searched")
        screen.click("page-next")
        screen.until("there are no more", lambda: not screen.one("page-next").is_enabled())
        assert screen.path == f"/console/audit?filter=mine&to={'00ab'.ljust(40, '0')}"
        screen.says("audit-empty", "No records that contain this.")
        screen.click("page-previous")
        screen.says("audit-empty", "among those searched")
    finally:
        screen.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
