// "Run twice under load": one request alone, then the same among neighbours; both outputs compared exactly.
//
// The second run starts only when the neighbours have been seen to decode, and the result says how many were and how
// many still were when it ended: an equality without load would prove nothing.
import { ApiError, getJson, isAbort, readEvents, send } from "./api.js";
import { compare } from "./compare.js";
import { figures, streamChat } from "./completion.js";
import { announce, byId, count, element } from "./dom.js";
import { fetchStatus } from "./gauges.js";
import { readSettings, withSystemPrompt } from "./settings.js";

const PATIENCE_MS = 60_000;
const PENDING = "…";
const SUBJECTS = ["the sea", "a lost key", "winter", "bees", "a long journey", "the moon", "bread", "an old clock"];

let running = null;

/** Connect the comparison to the page. */
export function startTwice() {
  const neighbours = byId("neighbours");
  neighbours.addEventListener("input", () => {
    byId("neighbours-value").textContent = neighbours.value;
  });
  byId("twice").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else run();
  });
  byId("twice-prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) byId("twice").requestSubmit();
  });
}

/** Stop the comparison under way, if there is one. */
export function stopTwice() {
  running?.abort();
}

/** Offer only what the server accepts. */
export function applyServer({ accepts_deterministic: accepted }) {
  const [deterministic, ordinary] = document.getElementsByName("kind");
  deterministic.disabled = !accepted;
  if (!accepted) ordinary.checked = true;
}

async function run() {
  const settings = readSettings();
  const prompt = byId("twice-prompt").value.trim();
  if (!settings || prompt === "") return;
  running = new AbortController();
  const { signal } = running;
  byId("run-twice").textContent = "Stop";
  const request = {
    ...settings,
    messages: withSystemPrompt([{ role: "user", content: prompt }]),
    deterministic: document.querySelector('input[name="kind"]:checked').value === "deterministic",
    seed: settings.seed ?? String(crypto.getRandomValues(new Uint32Array(1))[0]), // the same for both runs
    logprobs: true,
    return_token_ids: true,
  };
  try {
    await runBoth(request, byId("neighbours").valueAsNumber, signal);
    showProgress("");
  } catch (error) {
    showProgress(isAbort(error) ? "Stopped." : error.message, !isAbort(error));
  } finally {
    running = null;
    byId("run-twice").textContent = "Run twice";
  }
}

async function runBoth(request, numNeighbours, signal) {
  const before = await fetchStatus();
  const [model] = (await getJson("v1/models")).data;
  const load = new Load(Math.min(numNeighbours, before.requests.max_running - 1), request, model.max_model_len);
  const card = new ResultCard(request, load.size);
  showProgress("Running alone …");
  try {
    const alone = await streamChat(request, { signal, onProgress: (part) => card.showOutput(0, part) });
    await load.start(signal);
    showProgress(`Running with ${count(load.size, "neighbour")} …`);
    const { numRunning, numTokens } = load;
    const loaded = await streamChat(request, { signal, onProgress: (part) => card.showOutput(1, part) });
    card.showVerdict(alone, loaded, {
      strangers: before.requests.running,
      numBefore: numRunning,
      numAfter: load.numRunning,
      numTokens: load.numTokens - numTokens,
    });
  } finally {
    load.stop();
    card.finish();
  }
}

function showProgress(text, isError = false) {
  byId("progress").textContent = text;
  byId("progress").classList.toggle("error", isError);
  if (text) announce(text);
}

/** The neighbours: one streamed request with many prompts, since a browser opens six connections only. */
class Load {
  constructor(size, { max_tokens: maxTokens }, maxModelLen) {
    this.size = size;
    this.body = {
      prompt: Array.from({ length: this.size }, (_, index) => `Story ${index + 1}, about ${SUBJECTS[index % 8]}. `),
      deterministic: false,
      temperature: 1,
      ignore_eos: true,
      // Enough to outlast a request that is verified, but no more than the model has room for.
      max_tokens: Math.max(1, Math.min((maxTokens ?? maxModelLen) * 4 + 256, maxModelLen - 64)),
      return_token_ids: true,
      stream: true,
    };
    this.controller = new AbortController();
    this.seen = new Set();
    this.numTokens = 0;
    this.numFinished = 0;
  }

  /** Resolves when all neighbours have decoded a token, or as many as there was memory for. */
  async start(signal) {
    if (this.size === 0) return;
    signal.addEventListener("abort", () => this.stop());
    showProgress(`Starting ${count(this.size, "neighbour")} …`);
    const tooShort = new ApiError("The neighbours ended before all of them had begun.", 0);
    await new Promise((resolve, reject) => {
      this.follow(resolve).then(() => reject(tooShort), reject);
      setTimeout(resolve, PATIENCE_MS);
    });
  }

  get numRunning() {
    return this.seen.size - this.numFinished;
  }

  async follow(started) {
    const response = await send("v1/completions", { body: this.body, signal: this.controller.signal });
    for await (const chunk of readEvents(response)) {
      for (const { index, token_ids: tokens, finish_reason: reason } of chunk.choices) {
        this.seen.add(index);
        this.numTokens += tokens?.length ?? 0;
        if (reason) this.numFinished += 1;
      }
      if (this.seen.size === this.size) started();
    }
  }

  stop() {
    this.controller.abort();
  }
}

/** What came of one comparison. There is one card per kind of request, the newest first. */
class ResultCard {
  constructor({ deterministic, seed, temperature, top_p: topP, max_tokens: maxTokens }, numNeighbours) {
    this.deterministic = deterministic;
    const kind = deterministic ? "deterministic" : "ordinary";
    const chosen = { seed, temperature, top_p: topP, "max tokens": maxTokens };
    const given = Object.entries(chosen).filter(([, value]) => value !== undefined);
    const parameters = given.map(([name, value]) => `${name} ${value}`).join(" · ");
    this.verdict = element("p", { class: "verdict" }, PENDING);
    this.details = element("ul", { class: "muted" });
    const withNeighbours = numNeighbours === 0 ? "Alone again" : `With ${count(numNeighbours, "neighbour")}`;
    this.outputs = ["Alone", withNeighbours].map((title) => makeOutput(title));
    this.node = element(
      "section",
      { class: "result", "data-kind": kind, "aria-label": `Result of the ${kind} request` },
      element("h3", {}, `${deterministic ? "Deterministic" : "Ordinary"} request`),
      element("p", { class: "muted parameters" }, parameters),
      this.verdict,
      element("div", { class: "pair" }, ...this.outputs.map(({ node }) => node)),
      this.details,
    );
    document.querySelector(`.result[data-kind="${kind}"]`)?.remove();
    byId("results").prepend(this.node);
  }

  showOutput(index, { text, tokenIds }) {
    const { body, foot } = this.outputs[index];
    body.textContent = text;
    foot.textContent = count(tokenIds.length, "token");
  }

  /** The comparison is over, with a verdict or without. */
  finish() {
    if (this.verdict.textContent === PENDING) this.verdict.textContent = "Not finished.";
  }

  showVerdict(alone, loaded, load) {
    const result = compare(alone, loaded);
    for (const [index, completion] of [alone, loaded].entries()) {
      markDifference(this.outputs[index].body, completion, result);
      const own = figures(completion).filter(({ text: [before] }) => before === ""); // seed and contract are both runs'
      this.outputs[index].foot.textContent = own.map(({ text }) => text.join("")).join(" · ");
    }
    const [sign, kind, text] = judge(result, alone, this.deterministic);
    this.verdict.classList.add(kind);
    this.verdict.replaceChildren(element("span", { "aria-hidden": "true" }, sign), ` ${text}`);
    const facts = [...describeDifference(result, alone, loaded), ...describeLoad(load)];
    const contracts = new Set([alone.fingerprint, loaded.fingerprint]); // two if the server was started anew
    facts.push(`contract ${[...contracts].join(", then ")}`);
    this.details.replaceChildren(...facts.map((fact) => element("li", {}, fact)));
    announce(`${text} ${facts[0]}`);
  }
}

function makeOutput(title) {
  const body = element("div", { class: "output" });
  const foot = element("p", { class: "muted" });
  return { body, foot, node: element("article", { "aria-label": title }, element("h4", {}, title), body, foot) };
}

/** [sign, class, text] of the verdict. */
function judge({ complete, equal, token }, alone, deterministic) {
  if (!complete) return ["?", "unclear", "The server sent no tokens with log-probabilities: nothing can be compared."];
  const tokens = count(alone.tokenIds.length, "token");
  const numbers = `${tokens} and ${count(alone.logprobs.length, "log-probability", "log-probabilities")}`;
  if (equal && deterministic) return ["=", "equal", `Equal: ${numbers} identical, bit for bit.`];
  if (equal) return ["=", "unclear", `Equal this time: ${numbers} identical. An ordinary request is promised nothing.`];
  const what = token === null ? "same tokens, other log-probabilities" : "other tokens";
  if (deterministic) return ["≠", "different", `Different: ${what}. This must not happen; please report it.`];
  return ["≠", "different", `Different: ${what}. An ordinary request is promised nothing.`];
}

function describeDifference({ token, character, logprob, numLogprobs, complete }, alone, loaded) {
  const facts = [];
  if (token !== null) {
    const place = character === null ? "" : `, character ${character + 1}`;
    facts.push(`first different token: ${token + 1}${place}`);
  }
  if (complete && logprob !== null) {
    const [first, second] = [alone, loaded].map(({ logprobs }) => logprobs[logprob] ?? "none");
    facts.push(`first different log-probability: token ${logprob + 1}, ${first} and ${second}; ${numLogprobs} differ`);
  }
  return facts;
}

function describeLoad({ strangers, numBefore, numAfter, numTokens }) {
  const facts = [];
  if (strangers > 0) facts.push(`not quite alone: ${count(strangers, "other request")} ran when the first run began`);
  if (numBefore > 0) {
    const first = `${count(numBefore, "neighbour")} decoded when the second run began, ${numAfter} when it ended`;
    facts.push(`${first}, ${count(numTokens, "token")} in between`);
  }
  return facts;
}

function markDifference(node, { pieces, tokenIds, text }, { token }) {
  if (token === null || pieces.length !== tokenIds.length) {
    node.textContent = text;
    return;
  }
  const mark = pieces[token] ?? "";
  const shown = mark.trim() === "" ? mark.replaceAll("\n", "⏎\n") || "(end)" : mark;
  node.replaceChildren(
    pieces.slice(0, token).join(""),
    element("mark", { "aria-label": `first difference: ${shown}` }, shown),
    element("span", { class: "after" }, pieces.slice(token + 1).join("")),
  );
}
