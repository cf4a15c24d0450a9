// The page: views, theme, what the server is, and the keys that work everywhere.
import { getJson } from "./api.js";
import { startChat, stopChat } from "./chat.js";
import { byId, element } from "./dom.js";
import { onStatus, startPolling } from "./gauges.js";
import * as settings from "./settings.js";
import * as twice from "./twice.js";

const MODES = {
  auto: "In mode auto most tokens are committed at once; only those from fast passes are candidates first.",
  verify: "In mode verify every token is a candidate first and is then verified in a window with others.",
  invariant: "In mode invariant every pass is canonical, so tokens are committed at once.",
  off: "In mode off deterministic requests are refused.",
};
const JITTER = " The jitter kernels disturb every result by the size of its batch, so expect rollbacks.";

function showView() {
  const hash = location.hash.slice(1);
  if (hash === "main") return; // the skip link moves the focus only
  const view = hash === "twice" ? "twice" : "chat";
  document.body.dataset.view = view;
  for (const name of ["chat", "twice"]) {
    byId(`view-${name}`).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function openComparison(prompt) {
  byId("twice-prompt").value = prompt;
  location.hash = "twice";
  window.scrollTo(0, 0);
  byId("run-twice").focus();
}

function startTheme() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}

function showServer({ model, mode, kernels, summary, system_fingerprint: fingerprint }) {
  const parts = [
    element("strong", {}, model),
    element("span", {}, `mode ${mode}`),
    element("span", {}, `${kernels} kernels`),
    element("span", { title: summary }, "contract ", element("code", {}, fingerprint)),
  ];
  byId("server-line").replaceChildren(...parts);
  byId("mode-note").textContent = (MODES[mode] ?? "") + (kernels === "jitter" ? JITTER : "");
  document.title = `${model} · LLM-42`;
}

let shown = null;

// Once per server: a status comes every second.
onStatus((status) => {
  const { model, mode, kernels, system_fingerprint: fingerprint, refusal } = status;
  const identity = JSON.stringify([model, mode, kernels, fingerprint, refusal]);
  if (identity === shown) return;
  shown = identity;
  showServer(status);
  settings.applyServer(status);
  twice.applyServer(status);
});

window.addEventListener("hashchange", showView);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  stopChat();
  twice.stopTwice();
});
showView();
startTheme();
startChat(openComparison);
twice.startTwice();
startPolling();
getJson("v1/models").catch(() => {}); // asks for the key at once if the server has one; the gauges show other troubles
