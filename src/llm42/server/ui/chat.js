// The chat. State is the list of turns; a turn is a question and its answer, and the messages of a request follow from
// the turns before it.
import { isAbort, newRequestId, readEvents, send } from "./api.js";
import { figures, streamChat } from "./completion.js";
import { announce, byId, count, element } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { readSettings, withSystemPrompt } from "./settings.js";
import { TokenView, describeRollbacks } from "./tokens.js";

const EXAMPLES = ["What is the capital of France?", "Explain rainbows to a child.", "Write a haiku about the sea."];

const turns = [];
let running = null; // the AbortController of the answer under way

/** Connect the chat to the page. `compare(prompt)` opens the comparison with a prompt. */
export function startChat(compare) {
  const prompt = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else ask(prompt.value.trim(), compare);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) ask(prompt.value.trim(), compare);
  });
  byId("new-chat").addEventListener("click", () => {
    cutBefore(0);
    prompt.focus();
  });
  for (const example of EXAMPLES) {
    const button = element("button", { type: "button", onclick: () => ask(example, compare) }, example);
    byId("examples").append(element("li", {}, button));
  }
  showState();
}

/** Stop the answer under way, if there is one. */
export function stopChat() {
  running?.abort();
}

async function ask(question, compare) {
  const settings = question && !running ? readSettings() : null;
  if (!settings) return;
  const turn = new Turn(question, settings, compare);
  byId("prompt").value = "";
  turns.push(turn);
  byId("turns").append(turn.node);
  running = new AbortController();
  showState();
  showEnd();
  await turn.run(messagesFor(turn), running.signal);
  running = null;
  showState();
}

function messagesFor(turn) {
  const answered = turns.slice(0, turns.indexOf(turn)).filter(({ answer }) => answer !== "");
  const before = answered.flatMap(({ question, answer }) => [
    { role: "user", content: question },
    { role: "assistant", content: answer },
  ]);
  return withSystemPrompt([...before, { role: "user", content: turn.question }]);
}

function cutBefore(index) {
  running?.abort();
  for (const { node } of turns.splice(index)) node.remove();
  showState();
}

function showState() {
  byId("send").textContent = running ? "Stop" : "Send";
  byId("send").classList.toggle("stop", running !== null);
  byId("welcome").hidden = turns.length > 0;
  byId("new-chat").disabled = turns.length === 0;
  document.body.classList.toggle("answering", running !== null);
}

class Turn {
  constructor(question, settings, compare) {
    this.question = question;
    this.settings = settings;
    this.answer = "";
    this.tokens = new TokenView();
    this.plain = element("div", { class: "plain" });
    this.text = element("div", { class: "text", hidden: true });
    const waiting = element("li", {}, "waiting for the first token");
    this.figures = element("ul", { class: "figures", "aria-label": "Figures" }, waiting);
    this.rollbacks = element("details", { class: "rollbacks", hidden: true }, element("summary"), element("ol"));
    this.error = element("p", { class: "error", role: "alert", hidden: true });
    this.actions = element("div", { class: "actions" }, ...this.makeActions(compare));
    const parts = [this.plain, this.tokens.node, this.text, this.error, this.figures, this.rollbacks, this.actions];
    this.answerNode = element("article", { class: "answer", "aria-label": "Answer", "aria-busy": "true" }, ...parts);
    const asked = element("article", { class: "question", "aria-label": "Your message" }, question);
    this.node = element("li", {}, asked, this.answerNode);
  }

  makeActions(compare) {
    const make = (label, onclick) => element("button", { type: "button", class: "quiet", onclick }, label);
    this.view = make("Show tokens", () => this.showTokens(this.tokens.node.hidden));
    this.view.setAttribute("aria-pressed", "false");
    const again = (sends) => {
      cutBefore(turns.indexOf(this));
      byId("prompt").value = this.question;
      byId("prompt").focus();
      if (sends) byId("composer").requestSubmit();
    };
    return [
      this.view,
      make("Retry", () => again(true)),
      make("Edit", () => again(false)),
      make("Run twice under load", () => compare(this.question)),
    ];
  }

  /** Send the request, show its stream and its end. Never throws: what failed is shown in the turn. */
  async run(messages, signal) {
    const requestId = newRequestId();
    const events = new AbortController();
    signal.addEventListener("abort", () => events.abort());
    const watching = this.watch(requestId, events.signal);
    await within(500, watching.opened); // so that no token is missed; a proxy may hold the headers back
    let completion = null;
    try {
      const progress = (current) => this.showProgress((completion = current));
      const body = { messages, ...this.settings, return_token_ids: true };
      await streamChat(body, { requestId, signal, onProgress: progress });
      await within(500, watching.ended); // the last events may come after the last chunk
      this.finish(completion, null);
    } catch (error) {
      this.finish(completion, isAbort(error) ? "Stopped." : error.message);
    } finally {
      events.abort();
    }
  }

  /** Follow the request's tokens. `opened` and `ended` are promises that never fail: without events there is text. */
  watch(requestId, signal) {
    const opening = send(`llm42/events/${requestId}`, { signal });
    const following = opening.then(async (response) => {
      for await (const event of readEvents(response)) {
        follow(() => {
          this.tokens.apply(event);
          this.plain.hidden = !this.tokens.isEmpty;
        });
      }
    });
    const quiet = () => {};
    return { opened: opening.catch(quiet), ended: following.catch(quiet) };
  }

  showProgress(completion) {
    this.answer = completion.text;
    follow(() => {
      if (this.tokens.isEmpty) this.plain.textContent = completion.text;
      this.showFigures(figures(completion));
    });
  }

  showFigures(items) {
    const nodes = items.map(({ text: [before, value, after], explanation }) =>
      element("li", { title: explanation }, before, element("b", {}, value), after),
    );
    this.figures.replaceChildren(...nodes);
  }

  finish(completion, problem) {
    this.tokens.finish();
    this.answerNode.setAttribute("aria-busy", "false");
    if (completion) this.showFigures(figures(completion));
    else this.figures.hidden = true;
    this.error.hidden = problem === null;
    this.error.textContent = problem ?? "";
    this.text.replaceChildren(...renderMarkdown(this.answer));
    this.plain.hidden = true;
    this.view.hidden = this.tokens.isEmpty;
    this.showTokens(false);
    this.showRollbacks();
    this.node.classList.add("finished");
    follow(() => {});
    if (problem === null) announce(`Answer: ${this.answer}`);
  }

  showTokens(shown) {
    this.tokens.node.hidden = !shown;
    this.text.hidden = shown;
    this.view.setAttribute("aria-pressed", String(shown));
  }

  showRollbacks() {
    const { rollbacks } = this.tokens;
    if (rollbacks.length === 0) return;
    const [summary, list] = this.rollbacks.children;
    summary.textContent = count(rollbacks.length, "rollback");
    list.replaceChildren(...describeRollbacks(rollbacks));
    this.rollbacks.hidden = false;
  }
}

/** Make `change`, and keep the end of the conversation in view if it was. */
function follow(change) {
  const followed = hiddenHeight() < 60;
  change();
  if (followed) showEnd();
}

function showEnd() {
  const height = hiddenHeight();
  if (height > 0) window.scrollBy({ top: height, behavior: "instant" });
}

/** How much of the conversation's end lies behind the composer or below it. */
function hiddenHeight() {
  return byId("turns").getBoundingClientRect().bottom - byId("composer").getBoundingClientRect().top;
}

/** Wait for `promise`, but no longer than `milliseconds`. */
function within(milliseconds, promise) {
  return Promise.race([promise, new Promise((resolve) => setTimeout(resolve, milliseconds))]);
}
