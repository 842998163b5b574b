// Every live value has an age. An element with data-age (ISO instant) and data-stale-after (seconds) turns stale
// past its limit: values inside become a dash, it is hatched, and its sentence says since when.
// No time, an unparsable one or one in the future is stale too: unknown is not OK.
import { local, words } from "./times.js";

const FUTURE_TOLERANCE_S = 2;
const DASH = "—";
let offsetMs = 0; // server clock minus this clock
let exact = false;
let frozenMs = null; // a page that shows the past has a clock that stands still

/** The server's clock as far as this page knows it, in milliseconds. */
export function serverNow() {
  return frozenMs ?? Date.now() + offsetMs;
}

/** From now on it is this instant, in milliseconds. */
export function freeze(atMs) {
  frozenMs = atMs;
}

/** Learn the server's clock from an instant it just sent. The largest offset seen travelled fastest. */
export function learnClock(iso) {
  const at = Date.parse(iso);
  if (Number.isNaN(at)) return;
  const seen = at - Date.now();
  offsetMs = exact ? Math.max(seen, offsetMs - 5) : seen;
  exact = true;
}

/** Seconds since an instant, or null when it cannot be trusted. */
export function ageSeconds(iso) {
  const at = Date.parse(iso ?? "");
  if (Number.isNaN(at)) return null;
  const age = (serverNow() - at) / 1000;
  return age < -FUTURE_TOLERANCE_S ? null : Math.max(age, 0);
}

/** The values an element answers for: those inside it that no closer aged element answers for. */
function valuesOf(element) {
  return [...element.querySelectorAll("[data-value]")].filter((value) => value.closest("[data-stale-after]") === element);
}

function sentence(element, age, limit) {
  if (age === null) return "The time of the last update cannot be read or lies in the future. Values are not shown because they may be wrong.";
  return `No update since ${local(element.dataset.age)} (${words(age)} ago, limit ${limit} s). Values are not shown because they may be wrong.`;
}

function setStale(element, age, limit) {
  element.classList.add("stale");
  for (const value of valuesOf(element)) {
    if (value.textContent === DASH) continue;
    value.dataset.held = value.textContent;
    value.textContent = DASH;
  }
  const note = noteOf(element);
  if (note) note.textContent = sentence(element, age, limit);
}

function setFresh(element) {
  element.classList.remove("stale");
  for (const value of valuesOf(element)) {
    if (value.dataset.held === undefined) continue;
    value.textContent = value.dataset.held;
    delete value.dataset.held;
  }
  const note = noteOf(element);
  if (note) note.textContent = "";
}

function noteOf(element) {
  const named = element.dataset.staleNoteId && document.getElementById(element.dataset.staleNoteId);
  return named || element.querySelector("[data-stale-note]");
}

/** Write a live value. While its element is stale the dash stays; the value shows when the element is fresh again.
    A name, which has no [data-value], does not age. */
export function setValue(element, text) {
  const owner = element.closest("[data-stale-after]");
  if (owner?.classList.contains("stale") && "value" in element.dataset) element.dataset.held = text;
  else if (element.textContent !== text) element.textContent = text;
}

/** Mark an element as updated at an instant (ISO); it is fresh or stale at once. */
export function touch(element, iso) {
  element.dataset.age = iso ?? "";
  check(element);
}

function check(element) {
  const limit = Number(element.dataset.staleAfter);
  const age = ageSeconds(element.dataset.age);
  const stale = age === null || !(age <= limit);
  if (stale) setStale(element, age, limit);
  else if (element.classList.contains("stale")) setFresh(element);
}

function tick() {
  for (const element of document.querySelectorAll("[data-stale-after]")) check(element);
  for (const element of document.querySelectorAll("time[data-ago]")) {
    const age = ageSeconds(element.dateTime);
    const text = age === null ? DASH : `${words(age)} ago`;
    if (element.textContent !== text) element.textContent = text;
  }
}

export function start() {
  const meta = document.querySelector("meta[name=server-time]");
  // Low by the time the answer travelled; the first frame of a socket replaces it.
  const opened = performance.getEntriesByType("navigation")[0]?.responseStart ?? 0;
  const at = Date.parse(meta?.content ?? "");
  if (!Number.isNaN(at) && !exact) offsetMs = at - (performance.timeOrigin + opened);
  tick();
  setInterval(tick, 1000);
}
