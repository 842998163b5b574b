// System, light, dark. The choice is a cookie, so that the server writes data-theme and nothing flashes.
const COOKIE = "flexband_theme";
const ORDER = ["system", "light", "dark"];

export function current() {
  return document.documentElement.dataset.theme || "system";
}

/** Pin a theme ("light", "dark") or give the choice back to the system ("system"). */
export function choose(theme) {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  const age = theme === "system" ? 0 : 31536000;
  const secure = location.protocol === "https:" ? "; Secure" : "";
  document.cookie = `${COOKIE}=${theme}; Path=/; Max-Age=${age}; SameSite=Lax${secure}`;
  label();
  announceChange();
}

function announceChange() {
  document.dispatchEvent(new CustomEvent("flexband:theme"));
}

function label() {
  for (const button of document.querySelectorAll("[data-theme-toggle]")) {
    button.setAttribute("aria-label", `Theme: ${current()}. Change theme`);
    button.title = `Theme: ${current()}`;
  }
}

export function start() {
  label();
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-toggle]")) return;
    choose(ORDER[(ORDER.indexOf(current()) + 1) % ORDER.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announceChange);
}
