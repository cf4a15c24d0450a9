// The parameters of requests as the form has them. An empty field is not sent, so that the server's default holds.
import { byId } from "./dom.js";

const NUMBERS = { temperature: "temperature", top_p: "top-p", max_tokens: "max-tokens" };

/** The fields of a request, or null after showing which field is wrong. */
export function readSettings() {
  if (!byId("settings").reportValidity()) return null;
  const fields = { deterministic: byId("deterministic").checked };
  for (const [name, id] of Object.entries(NUMBERS)) {
    if (byId(id).value !== "") fields[name] = byId(id).valueAsNumber;
  }
  const seed = byId("seed").value.trim();
  if (seed !== "") fields.seed = BigInt(seed).toString(); // "007" is no JSON number
  return fields;
}

/** `messages` with the system prompt, if there is one, before them. */
export function withSystemPrompt(messages) {
  const content = byId("system-prompt").value.trim();
  return content === "" ? messages : [{ role: "system", content }, ...messages];
}

/** Take the switch away where the server refuses deterministic requests, and say why. */
export function applyServer({ accepts_deterministic: accepted, refusal }) {
  byId("deterministic").disabled = !accepted;
  if (!accepted) byId("deterministic").checked = false;
  byId("refusal").hidden = accepted;
  byId("refusal").textContent = accepted ? "" : `Not on this server: ${refusal}`;
}
