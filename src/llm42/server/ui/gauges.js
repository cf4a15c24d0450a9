// The live gauges: /llm42/status once a second while the page is visible. All figures are the server's own; the
// throughput is what its counter of generated tokens grew by over its own clock.
import { getJson } from "./api.js";
import { byId, formatNumber } from "./dom.js";

const PERIOD_MS = 1000;
const HISTORY = 60;

const listeners = [];
const rates = [];
let previous = null;
let timer = null;

/** The server's last status, or null while it is not reachable. */
export let status = null;

/** Call `listener(status)` with every status that arrives. */
export function onStatus(listener) {
  listeners.push(listener);
}

/** Poll from now on, but not while the page is hidden. */
export function startPolling() {
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    previous = null; // no rate over the time that nobody looked
    if (!document.hidden) poll();
  });
  poll();
}

/** The status of this moment. */
export const fetchStatus = () => getJson("llm42/status");

async function poll() {
  clearTimeout(timer);
  try {
    show(await getJson("llm42/status", { quiet: true }));
  } catch (error) {
    showUnreachable(error);
  }
  clearTimeout(timer); // another poll may have started meanwhile
  if (!document.hidden) timer = setTimeout(poll, PERIOD_MS);
}

function showUnreachable(error) {
  const problem = byId("unreachable");
  const text = error.status === 0 ? "Server not reachable. Trying again every second." : error.message;
  if (problem.textContent !== text) problem.textContent = text; // said once, not every second
  problem.hidden = false;
  status = null;
  previous = null;
}

function show(next) {
  byId("unreachable").hidden = true;
  byId("unreachable").textContent = "";
  status = next;
  const { requests, tokens, kv_cache: cache, verification, uptime_s: time } = next;
  // A counter that went back belongs to a server that was started anew.
  if (previous && time > previous.time && tokens.generated >= previous.generated) {
    rates.push((tokens.generated - previous.generated) / (time - previous.time));
    rates.splice(0, rates.length - HISTORY);
    byId("rate").textContent = formatNumber(rates.at(-1), rates.at(-1) < 100 ? 1 : 0);
    drawSparkline();
  }
  previous = { time, generated: tokens.generated };
  setText("running", `${requests.running} of ${requests.max_running}`);
  setText("waiting", formatNumber(requests.waiting));
  byId("kv").value = cache.usage;
  setText("kv-text", `${Math.round(cache.usage * 100)} %`);
  setText("rollbacks", formatNumber(verification.rollbacks));
  setText("recomputed", formatNumber(verification.recomputed_tokens));
  setText("spot-checks", formatNumber(verification.spot_checks));
  setText("violations", formatNumber(verification.violations));
  byId("violations").classList.toggle("bad", verification.violations > 0);
  for (const listener of listeners) listener(next);
}

function setText(id, text) {
  byId(id).textContent = text;
}

function drawSparkline() {
  const highest = Math.max(...rates, 1);
  const offset = HISTORY - rates.length;
  const points = rates.map((rate, index) => {
    const x = ((offset + index) / (HISTORY - 1)) * 120;
    return `${x.toFixed(1)},${(31 - (rate / highest) * 29).toFixed(1)}`;
  });
  const [area, line] = byId("sparkline").children;
  const start = ((offset / (HISTORY - 1)) * 120).toFixed(1);
  line.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${start},32L${points.join("L")}L120,32Z`);
}
