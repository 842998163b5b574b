// New rows wait behind "+3 new" instead of pushing what is being read; an input filters the rows of a table.
import { say } from "./announce.js";

/** Holds rows for a list or tbody until its button is pressed. The button stays hidden while nothing waits. */
export class WaitingRows {
  #body; #button; #waiting = [];

  constructor(body, button) {
    this.#body = body;
    this.#button = button;
    button.addEventListener("click", () => this.release());
    this.#show();
  }

  /** Add one row element; a row whose data-key is on the page already replaces it in place at once. */
  add(row) {
    const key = row.dataset.key;
    const same = key && [...this.#body.children].find((child) => child.dataset.key === key);
    if (same) return same.replaceWith(row);
    this.#waiting = this.#waiting.filter((held) => !key || held.dataset.key !== key);
    this.#waiting.push(row);
    this.#show();
  }

  get count() { return this.#waiting.length; }

  release() {
    this.#body.prepend(...this.#waiting.reverse());
    say(`${this.#waiting.length} new shown`);
    this.#waiting = [];
    this.#show();
  }

  #show() {
    this.#button.hidden = this.count === 0;
    this.#button.textContent = `+${this.count} new`;
  }
}

function filter(input) {
  const wanted = input.value.trim().toLowerCase();
  const rows = document.querySelectorAll(`${input.dataset.filter} > tr, ${input.dataset.filter} > li`);
  let shown = 0;
  for (const row of rows) {
    row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
    if (!row.hidden) shown += 1;
  }
  const result = input.closest(".filters")?.querySelector(".result");
  if (result) result.textContent = `${shown} of ${rows.length}`;
}

/** <input type=search data-filter="#rows"> hides the rows of that tbody or list that do not hold the words. */
export function start() {
  document.addEventListener("input", (event) => {
    if (event.target.dataset?.filter) filter(event.target);
  });
  // rows that the server sent again are filtered like those before
  document.addEventListener("htmx:load", () => {
    for (const input of document.querySelectorAll("input[data-filter]")) if (input.value.trim()) filter(input);
  });
}
