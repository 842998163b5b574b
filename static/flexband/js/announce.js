// The one polite live region, toasts, and the page's worst state in title and favicon.

/** Say something once to screen readers. */
export function say(text) {
  const region = document.getElementById("live-region");
  if (region && region.textContent !== text) region.textContent = text;
}

/** A short note at the lower edge for `ms` milliseconds; also said. */
export function toast(text, ms = 6000) {
  const box = document.createElement("div");
  box.className = "toast";
  box.textContent = text;
  document.getElementById("toasts")?.append(box);
  say(text);
  setTimeout(() => box.remove(), ms);
}

const STATES = new Set(["ok", "risk", "bad", "unknown"]);

/** Title prefix such as "2 breached" and the matching favicon; an unknown word counts as unknown. */
export function pageState(state, tally) {
  const known = STATES.has(state) ? state : "unknown";
  const bare = document.title.replace(/^\([^)]*\) /, "");
  document.title = tally ? `(${tally}) ${bare}` : bare;
  const icon = document.getElementById("favicon");
  if (icon) icon.href = icon.dataset.base.replace("favicon.svg", `favicon-${known}.svg`);
}
