// Writes the state of a frame into what the server rendered. The names come from `templatetags/live.py`:
//   data-t path, data-f form      text            data-chip path, data-word path    status chip
//   data-c paths, data-base       class           data-a "attribute:path;..."       attributes
//   data-v path                   --v as a share  data-if path                      hidden when empty
//   data-time, data-ago-of        instants        data-each path                    keyed rows, <template> as last child
// Values change in place. Rows are reordered only when one came, went or changed its rank; new rows of a list that has
// a [data-new-for] button wait behind it.
import { setValue } from "/static/flexband/js/ages.js";
import { local } from "/static/flexband/js/times.js";
import { scan as scanTables } from "/static/flexband/js/tables.js";
import { WaitingRows } from "/static/flexband/js/rows.js";

const DASH = "—";
const waiting = new WeakMap();
const shapes = new Map();
const writers = new Map();

export const pick = (scope, path) => path.split(".").reduce((value, name) => value?.[name], scope) ?? null;

/** Kept: making one takes longer than all that is written with it in a second. */
function writer(places) {
  if (!writers.has(places)) {
    writers.set(places, new Intl.NumberFormat("en-GB", { minimumFractionDigits: places, maximumFractionDigits: places }));
  }
  return writers.get(places);
}

/** As `numerals.fixed`: grouped, half up, true minus, and what rounds to zero without being zero says so. */
export function fixed(value, places = 0) {
  if (value === null || !Number.isFinite(Number(value))) return DASH;
  const size = Math.abs(value);
  const text = writer(places).format(size);
  const sign = value < 0 ? "−" : "";
  if (size !== 0 && Number(text.replaceAll(",", "")) === 0) return `${sign}<${(10 ** -places).toFixed(places)}`;
  return sign + text;
}

export function format(value, form) {
  const [name, places] = (form ?? "").split(":");
  if (value === null || value === "") return form ? DASH : "";
  if (name === "count") return fixed(value, Number(places ?? 0));
  if (name === "ms") return fixed(value / 1e3, Number(places ?? 0));
  if (name === "s") return fixed(value / 1e6, Number(places ?? 0));
  if (name === "pct") return fixed(value * 100, Number(places ?? 0));
  return String(value);
}

/** Is the element in the scope of this row, and not in a row of a list inside it? */
function within(row, element) {
  const list = element.parentElement?.closest("[data-each]");
  return !list || list === row.parentElement || !row.contains(list);
}

function scoped(root, selector) {
  const found = [...root.querySelectorAll(selector)].filter((element) => within(root, element));
  return root.matches?.(selector) ? [root, ...found] : found;
}

function setChip(element, state) {
  const name = pick(state, element.dataset.chip) || "unknown";
  const word = String(pick(state, element.dataset.word) ?? "");
  if (element.textContent === word && element.classList.contains(name)) return;
  element.className = `chip ${name}`;
  element.replaceChildren(...(shapes.has(name) ? [shapes.get(name).cloneNode(true)] : []), word);
}

function setClass(element, state) {
  const given = element.dataset.c.split(" ").map((path) => pick(state, path)).filter(Boolean);
  const clock = element.dataset.clockOf && pick(state, element.dataset.clockOf) ? ["clock"] : [];
  const text = [element.dataset.base, ...given, ...clock].filter(Boolean).join(" ");
  if (element.className !== text) element.className = text;
}

function setAttributes(element, state) {
  for (const pair of element.dataset.a.split(";")) {
    const [name, path] = pair.split(":");
    const value = pick(state, path);
    if (value === null || value === "") element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

function setAgo(element, at) {
  const time = element.querySelector("time");
  if (!at) element.textContent = DASH;
  else if (time) time.dateTime = at;
  else {
    const made = document.createElement("time");
    made.dateTime = at;
    made.dataset.ago = "";
    element.replaceChildren(made);
  }
}

/** Write a state into root; lists in it are brought up to date row by row. */
export function bind(root, state) {
  for (const element of scoped(root, "[data-t]")) setValue(element, format(pick(state, element.dataset.t), element.dataset.f));
  for (const element of scoped(root, "[data-chip]")) setChip(element, state);
  for (const element of scoped(root, "[data-c]")) setClass(element, state);
  for (const element of scoped(root, "[data-a]")) setAttributes(element, state);
  for (const element of scoped(root, "[data-v]")) element.style.setProperty("--v", `${Math.min(1, Math.max(0, pick(state, element.dataset.v) ?? 0)) * 100}%`);
  for (const element of scoped(root, "[data-if]")) element.hidden = !pick(state, element.dataset.if);
  for (const element of scoped(root, "[data-unless]")) element.hidden = Boolean(pick(state, element.dataset.unless)?.length ?? pick(state, element.dataset.unless));
  for (const element of scoped(root, "[data-time]")) {
    const at = pick(state, element.dataset.time);
    const text = at ? local(at, element.dataset.timeForm) : DASH;
    if (element.textContent !== text) element.textContent = text;
  }
  for (const element of scoped(root, "[data-ago-of]")) setAgo(element, pick(state, element.dataset.agoOf));
  for (const list of scoped(root, "[data-each]")) each(list, state);
}

function each(list, state) {
  const items = pick(state, list.dataset.each);
  if (!Array.isArray(items)) return;
  const template = list.querySelector(":scope > template");
  const rows = new Map([...list.children].filter((row) => row !== template).map((row) => [row.dataset.key, row]));
  const button = document.querySelector(`[data-new-for="${CSS.escape(list.id || "-")}"]`);
  let moved = false;
  for (const item of items) {
    let row = rows.get(String(item.key));
    if (!row) {
      row = template.content.firstElementChild.cloneNode(true);
      row.dataset.key = item.key;
      bind(row, item);
      if (button && rows.size) {
        hold(list, button).add(row);
        continue;
      }
      moved = true;
      rows.set(String(item.key), row);
      list.insertBefore(row, template);
      if (list.closest("table.stack")) scanTables(list);
    } else bind(row, item);
    if (row.dataset.rank !== undefined && item.grade !== undefined && row.dataset.rank !== item.grade) {
      row.dataset.rank = item.grade;
      moved = true;
    }
  }
  const keys = new Set(items.map((item) => String(item.key)));
  for (const [key, row] of rows) if (!keys.has(key)) { row.remove(); moved = true; }
  if (moved) for (const item of items) { const row = rows.get(String(item.key)); if (row && keys.has(String(item.key))) list.insertBefore(row, template); }
}

function hold(list, button) {
  if (!waiting.has(list)) waiting.set(list, new WaitingRows(list, button));
  return waiting.get(list);
}

/** Shapes of the chips, taken from the page's own templates. */
export function learnShapes() {
  for (const chip of document.querySelector("#chip-shapes")?.content.querySelectorAll(".chip") ?? []) {
    const svg = chip.querySelector("svg");
    if (svg) shapes.set([...chip.classList].find((name) => name !== "chip"), svg);
  }
}
