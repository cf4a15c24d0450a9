// The server's HTTP interface: JSON, server-sent events read from fetch (EventSource cannot send a key), and errors in
// words. The key lives in sessionStorage and is asked for when the server answers 401.
import { byId } from "./dom.js";

/** A request that failed, with a message fit to be shown. `status` is 0 where there was no answer. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** An identifier for X-Request-Id. crypto.randomUUID exists only on https and localhost. */
export function newRequestId() {
  if (crypto.randomUUID) return crypto.randomUUID();
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Parse JSON, keeping seeds, which have 64 bits, as strings of digits: numbers here have 53. */
export function parseJson(text) {
  // Inside a JSON string the quotes would be escaped, so this matches fields only.
  return JSON.parse(text.replace(/"seed":\s*(\d+)/g, '"seed":"$1"'));
}

/** The JSON of `fields`, where `seed` is a string of digits or absent. */
export function toJson({ seed, ...fields }) {
  const text = JSON.stringify(fields);
  return seed === undefined ? text : `${text.slice(0, -1)},"seed":${seed}}`;
}

/** GET `path` as JSON. With `quiet`, a missing key is an error and not a question. */
export async function getJson(path, options = {}) {
  return parseJson(await (await send(path, options)).text());
}

/** GET `path`, or POST `body` to it. Returns the response, whose status is good; else throws ApiError. */
export async function send(path, { body, signal, requestId, quiet = false } = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body) headers["Content-Type"] = "application/json";
    if (requestId) headers["X-Request-Id"] = requestId;
    const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
    if (body) options.body = toJson(body);
    const response = await fetch(path, options).catch(rethrow);
    if (response.ok) return response;
    if (response.status === 401 && !quiet && (await askForKey(key))) continue;
    throw await asError(response);
  }
}

/** The events of a server-sent stream, parsed, up to `[DONE]`. An error event is thrown. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(rethrow);
      if (done) throw new ApiError("The server ended the connection before the answer was complete.", 0);
      buffer += value;
      const lines = buffer.split(/\r\n|\n|\r(?!$)/); // a final \r may be half of a line end
      buffer = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // keep-alive comments, event names, ends of events
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = parseJson(data);
        if (event.error) throw new ApiError(event.error.message, 500);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // left early: tell the server; a stream that failed is closed already
  }
}

/** Whether `error` means that the caller itself aborted. */
export const isAbort = (error) => error.name === "AbortError";

function rethrow(error) {
  if (isAbort(error)) throw error;
  throw new ApiError("The server cannot be reached. Is it still running?", 0);
}

async function asError(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 300) || response.statusText || `status ${response.status}`;
  try {
    const { error, detail } = JSON.parse(text);
    message = error?.message ?? (typeof detail === "string" ? detail : message);
  } catch {
    // Not JSON, such as a proxy's page: shown as it came.
  }
  if (response.status === 401) message = `The server needs its API key: ${message}`;
  if (response.status === 429) {
    const seconds = response.headers.get("Retry-After");
    message += seconds ? ` Try again in ${seconds} s.` : " Try again in a moment.";
  }
  return new ApiError(message, response.status);
}

let question = null;

/** Ask for the key, once however many requests need it. True if there is now another than `refused`. */
async function askForKey(refused) {
  if (sessionStorage.getItem("key") !== refused) return true; // answered while this request was under way
  question ??= showKeyDialog(refused !== null).finally(() => {
    question = null;
  });
  return question;
}

function showKeyDialog(wasRefused) {
  const dialog = byId("key-dialog");
  const field = byId("key");
  byId("key-refused").hidden = !wasRefused;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    const closed = () => {
      const given = dialog.returnValue === "use" && field.value !== "";
      if (given) sessionStorage.setItem("key", field.value);
      field.value = "";
      resolve(given);
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}
