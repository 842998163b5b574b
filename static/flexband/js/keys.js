// `/` filter, `g` and a letter to go somewhere, `?` help. Single keys can be switched off (stored here).
const STORE = "flexband.keys";
const CHORD_MS = 1500;
let waitingSince = 0;

function enabled() {
  try {
    return localStorage.getItem(STORE) !== "off";
  } catch {
    return true;
  }
}

function typing(target) {
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
}

function openHelp() {
  const help = document.getElementById("help");
  if (help && !help.open) help.showModal();
}

function focusFilter() {
  const filter = document.querySelector("[data-filter], input[type=search]");
  if (!filter) return false;
  filter.focus();
  filter.select?.();
  return true;
}

function go(letter) {
  const link = document.querySelector(`#help [data-go="${CSS.escape(letter)}"]`);
  if (link) location.assign(link.href);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !enabled() || typing(event.target)) return;
  if (document.querySelector("dialog[open]")) return;
  if (performance.now() - waitingSince < CHORD_MS && waitingSince) {
    waitingSince = 0;
    return go(event.key);
  }
  if (event.key === "g") waitingSince = performance.now();
  else if (event.key === "?") openHelp();
  else if (event.key === "/" && focusFilter()) event.preventDefault();
}

export function start() {
  document.addEventListener("keydown", onKey);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-open-help]")) openHelp();
    for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });
  const box = document.getElementById("keys-enabled");
  if (!box) return;
  box.checked = enabled();
  box.addEventListener("change", () => localStorage.setItem(STORE, box.checked ? "on" : "off"));
}
