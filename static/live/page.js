// What every live page does: one topic, bound into the page, with the worst state in title and favicon.
import { LiveSocket, serverNow } from "/static/flexband/js/socket.js";
import { touch } from "/static/flexband/js/ages.js";
import { pageState, say } from "/static/flexband/js/announce.js";
import { bind, learnShapes, pick } from "/static/live/bind.js";
import { Past } from "/static/live/past.js";

const HOUR_MS = 3_600_000;

/** Places spans and marks of strips by the server's clock; one that left the window is gone. */
function place() {
  const now = serverNow();
  for (const element of document.querySelectorAll("[data-span-from]")) {
    const from = Date.parse(element.dataset.spanFrom);
    // What was not heard is not drawn: a strip that is stale ends where it was told last.
    const heard = Date.parse(element.closest("[data-stale-after].stale")?.dataset.age ?? "");
    const to = element.dataset.spanTo ? Date.parse(element.dataset.spanTo) : Number.isNaN(heard) ? now : heard;
    const left = Math.max(0, 1 - (now - from) / HOUR_MS), right = Math.min(1, 1 - (now - to) / HOUR_MS);
    element.hidden = right <= 0 || Number.isNaN(from);
    element.style.setProperty("--from", `${left * 100}%`);
    if (element.matches(".slot")) element.style.setProperty("--v", `${Math.max(0, right - left) * 100}%`);
  }
  for (const tick of document.querySelectorAll("[data-axis-minutes]")) {
    const at = new Date(now - Number(tick.dataset.axisMinutes) * 60_000);
    tick.textContent = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  }
}

/** Subscribe the page's topic; `after(state, previous)` draws what bind does not. */
export function livePage(topic, after = () => {}) {
  learnShapes();
  const main = document.querySelector("main");
  let before = null;
  const bar = document.querySelector("[data-past]");
  const live = bar ? new Past(bar) : new LiveSocket("/ws/live/", { quietAfterMs: 10_000 });
  live.on(topic, (state) => {
    bind(main, state);
    for (const element of main.querySelectorAll("[data-stale-after]")) touch(element, pick(state, element.dataset.topic || "at") ?? "");
    pageState(state.state ?? "unknown", state.title ?? "");
    if (before && before.state !== state.state) say(state.title || "All contracts OK");
    after(state, before);
    before = state;
    place();
  });
  place();
  setInterval(place, 5000);
  setInterval(() => main.querySelector(".tally.stale") && pageState("unknown", "not known"), 1000);
  setTimeout(() => live.open(), 0);
  return live;
}

