"""A real Chromium showing the console of a real daemon; waits are for states, never for fixed times."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    NoSuchElementException,
    StaleElementReferenceException,
)
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from tests.patience import PATIENCE_S

T = TypeVar("T")
#: Chromium without a window and toolbar, whose main process works half as much for the same pages. Debian's script on
#: the path starts it as a child, which would outlive the script that the driver ends.
SHELL = "/usr/lib/chromium/chromium-headless-shell"
AXE = Path(__file__).parent / "vendor/axe.min.js"
#: With these options the browser sends no requests to other hosts. One process draws all pages: to start one for each
#: test takes a tenth of the browser's work.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb", "--window-size=1280,900"),
    "--renderer-process-limit=1",
)


#: Returns the first element if it is enabled and stays in place for two frames, since a click goes to the place that
#: the element had.
STANDS = """
const element = document.querySelector(arguments[0]);
if (!element || element.matches(":disabled")) return null;
element.scrollIntoView({block: "nearest"});
const before = element.getBoundingClientRect();
return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => {
  const after = element.getBoundingClientRect();
  done(before.top === after.top && before.left === after.left ? element : null);
})));
"""
#: Returns the first text that contains all words, of the elements that a user can see. Spaces are plain ones, although
#: the page keeps a number and its unit on one line.
SAYS = r"""
const [selector, words] = arguments;
const seen = [...document.querySelectorAll(selector)].filter(e => e.checkVisibility({visibilityProperty: true, checkVisibilityCSS: true}));
const texts = seen.map(e => (e.innerText ?? e.textContent).replaceAll("\xa0", " ").trim());
return texts.find(text => words.every(word => text.includes(word))) ?? null;
"""


#: Holds back the daemon's answer to the next call whose path contains ``window.late``.
LATE = """const prompt = window.fetch;
window.late = window.arrive = null;
window.fetch = async (path, more) => {
  const isLate = window.late !== null && path.includes(window.late);
  if (isLate) window.late = null;
  const answer = await prompt(path, more);
  if (!isLate) return answer;
  const body = await answer.arrayBuffer();
  await new Promise(done => { window.arrive = done; });
  return new Response(body, answer);
};"""
#: Delivers the held answer, and gives the page a moment in which it could make its mistake.
ARRIVES = """window.arrive();
window.arrive = null;
return new Promise(done => setTimeout(done, 200));"""

#: From now on, records every text of an element in ``window.noted``.
NOTES = """const [selector] = arguments;
window.noted = [];
const note = () => {
  const text = document.querySelector(selector)?.textContent;
  if (text !== undefined && text !== window.noted.at(-1)) window.noted.push(text);
};
note();
new MutationObserver(note).observe(document, {subtree: true, childList: true, characterData: true});"""


class NoBrowser(Exception):
    """Chromium or its driver is missing."""


def selector(testid: str, data: dict[str, str]) -> str:
    return f'[data-testid="{testid}"]' + "".join(f'[data-{name}="{value}"]' for name, value in data.items())


def start_browser(downloads: Path) -> Chrome:
    """Start Chromium. Raises NoBrowser."""
    chromium, driver = shutil.which(SHELL) or shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise NoBrowser("chromium or its headless shell, or chromedriver, is missing (etc/tools fetches them)")
    options = ChromeOptions()
    options.binary_location = chromium
    for each in OPTIONS:
        options.add_argument(each)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options=options, service=Service(driver))


@contextmanager
def showing(browser: Chrome, url: str) -> Iterator[Screen]:
    """Yield the empty window on a daemon. AssertionError: the browser reported an error."""
    screen = Screen(browser, url)
    yield screen
    complaints = screen.complaints()
    screen.as_it_was()
    assert complaints == []


class Screen:
    """The browser's window, and a user's actions in it."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.url = url

    # --- navigation ----------------------------------------------------------------------------

    def open(self, path: str, shows: str | None = None) -> Screen:
        """Load a page, and wait until it shows an element of this kind."""
        self.browser.get(self.url + path)
        if shows is not None:
            self.one(shows)
        return self

    @property
    def path(self) -> str:
        """The path as the page itself reports it; the browser's own state follows later."""
        return str(self.run("return location.href")).removeprefix(self.url)

    def theme(self, name: str) -> None:
        """Set the system's theme."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, width: int, height: int = 900) -> None:
        """Set the page's size, even below the window's minimum."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def as_it_was(self) -> None:
        """Reset the window: no page, token, theme or size."""
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        with suppress(Exception):
            self.run("sessionStorage.clear(); localStorage.clear();")
        self.browser.get("about:blank")
        self.browser.get_log("browser")

    @contextmanager
    def scripted(self, script: str) -> Iterator[None]:
        """Within the block, run this script before anything else in every page."""
        added = self.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        try:
            yield
        finally:
            self.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    @contextmanager
    def late(self, part: str, asked: Callable[[], object]) -> Iterator[None]:
        """Within the block, hold back the answer to the call that ``asked`` causes to a path with this part.

        The daemon has answered before the block begins, and the page gets the answer at its end. The page must run
        LATE.
        """
        self.run("window.late = arguments[0]", part)
        asked()
        self.until(f"the daemon has answered {part}", lambda: self.run("return window.arrive !== null"))
        yield
        self.run(ARRIVES)

    # --- observation ---------------------------------------------------------------------------

    def until(self, what: str, holds: Callable[[], T]) -> T:
        """Return the first true value of ``holds``; elements that are redrawn during a look are looked up again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            value = None
            with suppress(StaleElementReferenceException, NoSuchElementException, IndexError):
                value = holds()
            if value:
                return value
            if time.monotonic() > deadline:
                raise AssertionError(f"still not so: {what}\n{self.text()[:4000]}")
            time.sleep(0.05)

    def all(self, testid: str, **data: str) -> list[WebElement]:
        """Return the elements that exist now; ``data``: values of data attributes."""
        return self.browser.find_elements(By.CSS_SELECTOR, selector(testid, data))

    # Each look of the waits below is one short script: a command to the browser costs more than its answer.

    def one(self, testid: str, **data: str) -> WebElement:
        """Return the first such element, waiting for it if necessary."""
        first = "return document.querySelector(arguments[0])"
        return self.until(f"{testid} {data or ''} is shown", lambda: self.run(first, selector(testid, data)))

    def gone(self, testid: str, **data: str) -> None:
        absent = "return document.querySelector(arguments[0]) === null"
        self.until(f"{testid} {data or ''} is gone", lambda: self.run(absent, selector(testid, data)))

    def says(self, testid: str, *words: str, **data: str) -> str:
        """Return the text of the first such element that contains all of these words, waiting for it if necessary."""
        return str(self.until(f"{testid} says {words}", lambda: self.run(SAYS, selector(testid, data), words)))

    def note(self, selector: str) -> None:
        """From now on, record every text of the first such element, however briefly it is shown."""
        self.run(NOTES, selector)

    def noted(self) -> list[str]:
        """Return the recorded texts, in order."""
        return list(self.run("return window.noted"))

    def text(self) -> str:
        return str(self.run("return document.body ? document.body.innerText : ''"))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def worked_s(self) -> float:
        """Return the page's processor time, which does not depend on the machine's load."""
        self.browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        metrics = self.browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    def payload(self) -> str:
        """Return the exact text of the open message as shown."""
        return str(self.run("""return document.querySelector('pre[data-testid="message-payload"]')?.textContent"""))

    def rows(self) -> list[str]:
        """Return the ids of the visible messages, from top to bottom."""
        found = self.run(
            """return [...document.querySelectorAll('[data-testid="message-row"]')].map(e => e.dataset.id)"""
        )
        return list(found)

    # --- actions -------------------------------------------------------------------------------

    def click(self, testid: str, **data: str) -> None:
        def clicked() -> bool:
            element = self.run(STANDS, selector(testid, data))
            if element is None:
                return False
            with suppress(ElementClickInterceptedException):
                element.click()
                return True
            return False

        self.until(f"{testid} {data or ''} can be clicked", clicked)

    def click_in(self, by: str, value: str, testid: str, said: str = "", **data: str) -> None:
        """Click an element inside the element whose text contains ``said``."""

        def clicked() -> bool:
            element = next(each for each in (*self.all(testid, **data), None) if each is None or said in each.text)
            if element is None:
                return False
            with suppress(ElementClickInterceptedException):
                element.find_element(by, value).click()
                return True
            return False

        self.until(f"{value} in {testid} {data or ''} can be clicked", clicked)

    def type(self, testid: str, text: str, *, enter: bool = False) -> None:
        """Replace the content of a field."""
        field = self.one(testid)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text or Keys.DELETE)
        if enter:
            field.send_keys(Keys.ENTER)

    def choose(self, testid: str, value: str) -> None:
        Select(self.one(testid)).select_by_value(value)

    def press(self, *keys: str) -> None:
        ActionChains(self.browser).send_keys(*keys).perform()

    def focused(self, attribute: str) -> str | None:
        """Return an attribute of the focused element."""
        return self.browser.switch_to.active_element.get_attribute(attribute)

    # --- checks --------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """Return new errors in the browser's log: failed scripts, and violations of the policy."""
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if entry["level"] == "SEVERE" and "Failed to load resource" not in entry["message"]
        ]

    def accessibility(self) -> list[str]:
        """Return the page's problems that axe-core rates serious or critical."""
        self.run(AXE.read_text(encoding="utf-8"))
        found = self.browser.execute_async_script(
            """
            const done = arguments[arguments.length - 1];
            axe.run(document, {resultTypes: ["violations"]}).then(r => done(JSON.stringify(r.violations)), e => done(String(e)));
            """
        )
        return [
            f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes']][:3]}"
            for each in json.loads(found)
            if each["impact"] in ("serious", "critical")
        ]
