// The token view of one answer: committed tokens solid, candidates pale, rolled back ones struck above the token that
// stands in their place. Struck text takes no room in the line, so nothing that was read moves.
//
// Invariant: what is shown is the committed tokens of all events so far, followed by the candidates of the last one.
import { element } from "./dom.js";

const STRUCK_MS = 3500; // as long as the animation in app.css

export class TokenView {
  constructor() {
    this.numCommitted = 0;
    this.numCandidates = 0;
    /** Each rollback: {position, dropped: [text], instead: text or null}. */
    this.rollbacks = [];
    this.committed = element("span");
    this.outstanding = element("span");
    this.node = element("div", { class: "tokens" }, this.committed, this.outstanding);
  }

  get isEmpty() {
    return this.numCommitted + this.numCandidates === 0;
  }

  /** Show one event of /llm42/events/{id}. */
  apply({ committed = [], candidates = [], rolled_back: dropped = [] }) {
    const base = this.numCommitted;
    // What matched of the last candidates is committed now; the first that did not match stood behind it.
    const wrong = base + this.numCandidates - dropped.length;
    const nodes = committed.map((token, index) => {
      const wasCandidate = index < this.numCandidates && base + index < wrong;
      return this.makeToken("committed", token, base + index, wasCandidate && "was-candidate");
    });
    if (dropped.length > 0) this.strike(dropped, wrong, nodes[wrong - base] ?? null);
    this.committed.append(...nodes);
    this.numCommitted += committed.length;
    this.showCandidates(candidates);
  }

  /** Nothing more will come: what was never verified is not part of the answer. */
  finish() {
    this.showCandidates([]);
  }

  showCandidates(candidates) {
    this.numCandidates = candidates.length;
    const nodes = candidates.map((token, index) => this.makeToken("candidate", token, this.numCommitted + index));
    this.outstanding.replaceChildren(...nodes);
  }

  strike(dropped, position, replacement) {
    const texts = dropped.map(({ text }) => text);
    const instead = replacement?.textContent ?? null;
    this.rollbacks.push({ position, dropped: texts, instead });
    const shown = texts.join("").replaceAll("\n", "⏎");
    const struck = element("s", { class: "rolled-back", "aria-hidden": "true" }, shown);
    const place = replacement ?? this.committed.appendChild(element("span"));
    place.classList.add("corrected");
    if (replacement) place.title += `, instead of “${texts[0]}”`;
    place.append(struck);
    setTimeout(() => struck.remove(), STRUCK_MS);
  }

  makeToken(kind, { id, text }, position, more = "") {
    const title = `token ${position + 1}, id ${id}`;
    return element("span", { class: more ? `${kind} ${more}` : kind, title }, text);
  }
}

/** The list of what was rolled back, for <details>. */
export function describeRollbacks(rollbacks) {
  return rollbacks.map(({ position, dropped, instead }) =>
    element(
      "li",
      {},
      `token ${position + 1}: `,
      element("s", {}, visible(dropped.join(""))),
      ...(instead === null ? [] : [" became ", element("span", { class: "instead" }, visible(instead))]),
    ),
  );
}

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "\u00a0") || "(no text)";
}
