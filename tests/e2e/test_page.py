"""The page at / in a real browser, against a real server whose kernels lie: there are rollbacks and differences.

One server for all tests: a tiny random model, `jitter` kernels and mode `verify`, with an API key. After each test the
browser must have complained about nothing and asked no other host for anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from browser import CHROMIUM, FLAGS, LOW_CONTRAST, opened
from tiny_models import write_tiny_model

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH"),
    pytest.mark.xdist_group("page"),
]

KEY = "open sesame"
MAX_TOKENS = 24
NUM_NEIGHBOURS = 3
QUESTION = "What is a token?"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The base URL of the server."""
    directory = tmp_path_factory.mktemp("page")
    model = write_tiny_model(directory / "tiny", "llama")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "llm42", "serve", str(model), "--port", str(port), "--api-key", KEY]
    command += ["--kernels", "jitter", "--mode", "verify", "--window-size", "8", "--served-model-name", "tiny"]
    log = directory / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
    base = f"http://127.0.0.1:{port}/"
    try:
        while not is_ready(base):
            assert server.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        yield base
    finally:
        server.terminate()
        server.wait()


def is_ready(base):
    try:
        with urllib.request.urlopen(f"{base}ready") as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, url):
    """Opens the page: `page, complaints = open_page(key=..., view=..., **options of the browser context)`."""
    with contextlib.ExitStack() as stack:

        def open_page(key=KEY, view="chat", **options):
            storage = {} if key is None else {"key": key}
            return stack.enter_context(opened(browser, f"{url}#{view}", storage, **options))

        yield open_page


@pytest.fixture(scope="module")
def used_page(browser, url):
    """A page on which everything has happened: its chat has an answer, its comparison both results."""
    with opened(browser, url, {"key": KEY}) as (page, _):
        choose(page)
        ask(page, "x" * 200).get_by_role("button", name="Show tokens").click()
        show(page, "twice")
        run_twice(page, "ordinary")
        run_twice(page, "deterministic")
        yield page


def choose(page, **fields):
    """Fill in the parameters; names are the ids of the fields."""
    page.locator("#server-line strong").wait_for()
    for name, value in {"max-tokens": MAX_TOKENS, "temperature": 1, **fields}.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))


def show(page, view):
    page.click(f"nav a[href='#{view}']")


def ask(page, question=QUESTION):
    """Send a question and return its answer when it is finished."""
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    answer = page.locator("#turns > li").last
    answer.and_(page.locator(".finished")).wait_for()
    return answer


def run_twice(page, kind, prompt=QUESTION):
    """Run the comparison and return its card."""
    page.fill("#twice-prompt", prompt)
    page.check(f"input[value={kind}]")
    page.fill("#neighbours", str(NUM_NEIGHBOURS))
    page.press("#run-twice", "Enter")
    page.locator(f"[data-kind={kind}] .verdict:is(.equal, .different, .unclear)").or_(
        page.locator("#progress.error")
    ).wait_for()
    assert page.locator("#progress").inner_text() == ""
    return page.locator(f"[data-kind={kind}]")


def complete(url, **fields):
    """The choice of a chat completion that is not streamed."""
    body = {"max_tokens": MAX_TOKENS, "temperature": 1, "top_p": 0.95, "return_token_ids": True, **fields}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]


def test_an_answer_streams_to_its_end_and_the_next_question_carries_the_conversation(open_page):
    page, _ = open_page()
    choose(page)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    answer = ask(page)
    figures = answer.locator(".figures").inner_text()
    assert re.search(r"[1-9]\d* tokens", figures)
    assert re.search(r"seed \d+", figures)
    assert re.search(r"contract \w+", figures)
    announced = page.locator("#announcer").text_content()
    ask(page, "And a word?")
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert announced == f"Answer: {bodies[1]['messages'][1]['content']}"


def test_deterministic_tokens_are_candidates_first_and_what_is_committed_is_what_the_api_returns(open_page, url):
    page, _ = open_page()
    choose(page, seed=2**64 - 1)
    page.evaluate("""() => {
        window.seen = {candidate: 0, committed: 0, 'rolled-back': 0};
        new MutationObserver((records) => {
            for (const {addedNodes} of records) for (const node of addedNodes) for (const kind in window.seen)
                if (node.classList?.contains(kind) || node.querySelector?.('.' + kind)) window.seen[kind] += 1;
        }).observe(document.getElementById('turns'), {childList: true, subtree: true});
    }""")
    answer = ask(page)
    seen = page.evaluate("window.seen")
    assert min(seen.values()) > 0, seen
    assert answer.locator(".candidate").count() == 0
    assert re.search(r"[1-9]\d* rollbacks?", answer.locator(".rollbacks").inner_text())
    titles = answer.locator(".committed").evaluate_all("nodes => nodes.map((node) => node.title)")
    shown = [int(re.match(r"token \d+, id (\d+)", title).group(1)) for title in titles]
    message = {"role": "user", "content": QUESTION}
    expected = complete(url, messages=[message], seed=2**64 - 1, deterministic=True)
    assert shown == expected["token_ids"]
    assert f"seed {2**64 - 1}" in answer.locator(".figures").inner_text()


def test_ordinary_tokens_are_never_candidates(open_page):
    page, _ = open_page()
    choose(page)
    page.uncheck("#deterministic")
    page.evaluate("""() => {
        window.seen = 0;
        new MutationObserver(() => { window.seen += document.querySelectorAll('#turns .candidate').length; })
            .observe(document.getElementById('turns'), {childList: true, subtree: true});
    }""")
    answer = ask(page)
    assert answer.locator(".committed").count() > 0
    assert page.evaluate("window.seen") == 0


def test_a_deterministic_request_run_twice_under_load_is_equal(open_page):
    page, _ = open_page(view="twice")
    choose(page, seed=7)
    card = run_twice(page, "deterministic")
    match = re.search(r"Equal: (\d+) tokens and (\d+) log-probabilities identical, bit for bit", card.inner_text())
    assert match, card.inner_text()
    assert match[1] == match[2] != "0"
    assert f"{NUM_NEIGHBOURS} neighbours decoded when the second run began, {NUM_NEIGHBOURS} when" in card.inner_text()


def test_an_ordinary_request_run_twice_under_load_differs_where_it_is_marked(open_page):
    page, _ = open_page(view="twice")
    choose(page, seed=7)
    card = run_twice(page, "ordinary")
    assert "Different: other tokens" in card.locator(".verdict").inner_text()
    token = int(re.search(r"first different token: (\d+)", card.inner_text())[1])
    assert token <= MAX_TOKENS
    before, marks = (
        card.locator(".output").evaluate_all(f"nodes => nodes.map((node) => {expression})")
        for expression in ("node.firstChild.textContent", "node.querySelector('mark').textContent")
    )
    assert before[0] == before[1]
    assert marks[0] != marks[1]


def test_the_comparison_sees_the_last_bit_and_claims_nothing_without_numbers(open_page):
    page, _ = open_page()
    compare = """([first, second]) => import('/compare.js').then(({compare}) => compare(
        {text: 'a', finishReason: 'stop', ...first}, {text: 'a', finishReason: 'stop', ...second}))"""
    one = {"tokenIds": [1, 2], "logprobs": [-0.5, -1.1]}
    assert page.evaluate(compare, [one, one])["equal"]
    bit = page.evaluate(compare, [one, {**one, "logprobs": [-0.5, -1.1000000000000003]}])
    assert (bit["equal"], bit["token"], bit["logprob"], bit["numLogprobs"]) == (False, None, 1, 1)
    longer = page.evaluate(compare, [one, {"tokenIds": [1, 2, 3], "logprobs": [-0.5, -1.1, -2]}])
    assert (longer["equal"], longer["token"]) == (False, 2)
    for nothing in ({"tokenIds": [], "logprobs": []}, {"tokenIds": [1], "logprobs": []}):
        result = page.evaluate(compare, [nothing, nothing])
        assert not result["complete"]
        assert not result["equal"]


def test_a_models_markup_stays_text(open_page):
    page, _ = open_page()
    text = (
        "# One\n\n**bold** <img src=x onerror=alert(1)> `<b>`\n\n- [a](javascript:alert(1))\n\n```html\n<script>\n```"
    )
    tags = page.evaluate(
        """(text) => import('/markdown.js').then(({renderMarkdown}) => {
            document.getElementById('turns').append(...renderMarkdown(text));
            return [...document.querySelectorAll('#turns *')].map((node) => node.tagName.toLowerCase());
        })""",
        text,
    )
    assert set(tags) == {"h3", "p", "strong", "code", "ul", "li", "pre"}
    assert "<img src=x onerror=alert(1)>" in page.locator("#turns").inner_text()


def test_everything_works_by_keyboard_with_visible_focus(open_page):
    page, _ = open_page()
    choose(page, max_tokens=2000)
    reached = {}
    for _step in range(60):
        page.keyboard.press("Tab")
        name, has_outline = page.evaluate("""() => {
            const node = document.activeElement, style = getComputedStyle(node);
            if (node === document.body) return ['', true];  // past the last one, before the first one
            return [node.id || node.textContent.trim(), style.outlineStyle !== 'none' && style.outlineWidth !== '0px'];
        }""")
        if name in reached:
            break
        reached[name] = has_outline
    assert [name for name, has_outline in reached.items() if not has_outline] == []
    expected = {"Chat", "Run twice under load", "theme", "prompt", "send", "deterministic", "seed", "system-prompt"}
    assert expected <= reached.keys()
    page.focus("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.locator("#turns .committed").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    assert page.locator(".question").inner_text() == "one\ntwo"
    assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.parametrize("view", ["chat", "twice"])
def test_every_control_has_a_name_and_there_are_landmarks(used_page, view):
    show(used_page, view)
    session = used_page.context.new_cdp_session(used_page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]  # as the browser tells them to screen readers
    session.detach()
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
    ]
    controls = {"button", "textbox", "link", "switch", "radio", "slider", "spinbutton", "meter", "image", "article"}
    assert [role for role, name in found if role in controls and not name.strip()] == []
    assert {"banner", "navigation", "main", "complementary", "button", "textbox"} <= {role for role, _ in found}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(open_page, used_page, scheme):
    fresh, _ = open_page(color_scheme=scheme)  # its welcome shows every kind of token
    choose(fresh)
    assert fresh.locator(".candidate").is_visible()
    assert fresh.evaluate(LOW_CONTRAST) == []
    used_page.emulate_media(color_scheme=scheme)
    for view in ("chat", "twice"):
        show(used_page, view)
        assert used_page.evaluate(LOW_CONTRAST) == []


@pytest.mark.parametrize("view", ["chat", "twice"])
def test_a_narrow_screen_needs_no_horizontal_scrolling(used_page, view):
    show(used_page, view)
    used_page.set_viewport_size({"width": 360, "height": 740})
    assert used_page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_key_is_asked_for_kept_for_the_tab_and_asked_again_when_wrong(open_page):
    page, complaints = open_page(key=None)
    page.locator("#key-dialog[open]").wait_for()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.locator("#key-refused:visible").wait_for()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.locator("#server-line strong").wait_for()
    assert not page.locator("#key-dialog").is_visible()
    page.reload()
    page.locator("#server-line strong").wait_for()
    complaints.take("401")


def test_the_gauges_say_when_the_server_is_gone_and_recover(open_page):
    page, complaints = open_page()
    page.locator("#server-line strong").wait_for()
    assert page.locator("#running").inner_text() == "0 of 64"
    page.context.set_offline(True)
    page.get_by_text("Server not reachable").wait_for()
    page.context.set_offline(False)
    page.locator("#unreachable").wait_for(state="hidden")
    complaints.take("ERR_INTERNET_DISCONNECTED")


def test_a_hidden_page_does_not_poll(open_page):
    page, _ = open_page()
    page.locator("#server-line strong").wait_for()
    page.clock.install()
    polls = []
    page.on("request", lambda request: polls.append(request.url) if "status" in request.url else None)

    def become(hidden):
        page.evaluate(f"Object.defineProperty(document, 'hidden', {{value: {hidden}, configurable: true}})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    become("true")
    page.clock.run_for(5_000)
    assert polls == []
    become("false")
    page.wait_for_timeout(0)
    page.clock.run_for(1)
    assert len(polls) == 1


def test_an_error_is_shown_in_words_and_the_chat_goes_on(open_page):
    page, complaints = open_page()
    choose(page, max_tokens=10**6)
    answer = ask(page)
    assert "max_tokens" in answer.get_by_role("alert").inner_text()
    choose(page)
    assert re.search(r"[1-9]\d* tokens", ask(page).locator(".figures").inner_text())
    complaints.take("400")


def test_the_page_is_served_with_a_policy_that_lets_nothing_in(url):
    with urllib.request.urlopen(url) as response:
        policy = response.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
