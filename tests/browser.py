"""A real Chromium for tests of pages: where it is, what it complains of, and what it paints too pale."""

from __future__ import annotations

import contextlib
import json
import re
import shutil

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Complaints(list):
    """What the browser complained of; a test takes out what it provoked."""

    def take(self, pattern):
        """Remove what matches; there must be something."""
        matching = [text for text in self if re.search(pattern, text)]
        assert matching, f"nothing matches {pattern!r} in {self}"
        self[:] = [text for text in self if text not in matching]


@contextlib.contextmanager
def opened(browser, url, session_storage, **options):
    """A page in a context of its own, and what the browser complains of; there must be nothing left at the end.

    Nothing may be asked of another host than that of `url` either.
    """
    complaints, requests = Complaints(), []
    base = url.partition("#")[0]
    context = browser.new_context(**options)
    for name, value in session_storage.items():
        context.add_init_script(f"sessionStorage.setItem({json.dumps(name)}, {json.dumps(value)})")
    page = context.new_page()
    page.set_default_timeout(120_000)  # for slow machines; nothing here waits in vain
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(url)
    yield page, complaints
    context.close()
    assert complaints == []
    assert [address for address in requests if not address.startswith(base)] == []


LOW_CONTRAST = """() => {
    const parse = (color) => color.match(/[\\d.]+/g).map(Number);
    const channel = (value) => value <= 10.31475 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const ground = (node) => {
        const color = parse(getComputedStyle(node).backgroundColor);
        return color.length === 3 || color[3] > 0 || !node.parentElement ? color : ground(node.parentElement);
    };
    const low = [];
    for (const node of document.body.querySelectorAll('*')) {
        const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim() !== '');
        if (!hasText || node.disabled || !node.checkVisibility({visibilityProperty: true})) continue;
        const pair = [luminance(parse(getComputedStyle(node).color)), luminance(ground(node))].sort((a, b) => b - a);
        const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
        if (ratio < 4.5) low.push([node.tagName, node.className, node.textContent.slice(0, 30), ratio]);
    }
    return low;
}"""
"""JavaScript: the visible texts whose contrast with their ground is below 4.5, as it is painted."""
