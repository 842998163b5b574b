// Plays recorded frames into a live page: same interface as LiveSocket, with a slider instead of a socket.
import { freeze } from "/static/flexband/js/ages.js";
import { toast } from "/static/flexband/js/announce.js";
import { local } from "/static/flexband/js/times.js";

const MINUTE_MS = 60_000;
const STEP_MS = 1000;

export class Past {
  #bar; #topic; #at; #hour; #fns = new Set(); #minutes = new Map(); #timer = 0; #asked = 0;

  constructor(bar) {
    this.#bar = bar;
    this.#topic = bar.dataset.pastTopic;
    this.#at = Date.parse(bar.dataset.past);
    this.#hour = Date.parse(bar.dataset.pastHour);
    freeze(this.#at);
    bar.querySelector("[data-past-slider]").addEventListener("input", (event) => this.#go(this.#hour + Number(event.target.value) * STEP_MS));
    bar.querySelector("[data-past-play]").addEventListener("click", () => this.#toggle());
    for (const step of bar.querySelectorAll("[data-past-step]")) {
      const by = Date.parse(step.dataset.pastStep) - this.#at;
      step.addEventListener("click", (event) => { event.preventDefault(); this.#go(this.#at + by); });
    }
  }

  on(topic, fn) { if (topic === this.#topic) this.#fns.add(fn); }

  open() {}

  #toggle() {
    const button = this.#bar.querySelector("[data-past-play]");
    if (this.#timer) { clearInterval(this.#timer); this.#timer = 0; button.textContent = "Play"; return; }
    this.#timer = setInterval(() => this.#go(this.#at + STEP_MS), STEP_MS);
    button.textContent = "Pause";
  }

  /** Frames of the minute that holds an instant, from the server once. */
  async #frames(at) {
    const minute = Math.floor(at / MINUTE_MS) * MINUTE_MS;
    if (!this.#minutes.has(minute)) {
      const address = new URL("/live/frames/", location.href);
      address.searchParams.set("topic", this.#topic);
      address.searchParams.set("from", new Date(minute).toISOString());
      this.#minutes.set(minute, fetch(address).then(async (answer) => {
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        const text = await answer.text();
        return text ? text.split("\n").map((line) => JSON.parse(line)) : [];
      }));
      this.#minutes.get(minute).catch(() => this.#minutes.delete(minute));
      if (this.#minutes.size > 120) this.#minutes.delete(this.#minutes.keys().next().value);
    }
    return this.#minutes.get(minute);
  }

  async #go(at) {
    at = Math.min(at, Date.now() - STEP_MS);
    this.#at = at;
    const mine = ++this.#asked;
    let frames;
    try { frames = await this.#frames(at); } catch (error) { toast(`The recording cannot be read (${error.message}).`); return; }
    if (mine !== this.#asked) return; // the slider went on
    let state = null;
    for (const frame of frames) {
      if (Date.parse(frame.at) > at) break;
      state = frame.type === "snapshot" ? frame.data : { ...state, ...frame.data };
    }
    this.#shown(at, state === null);
    if (state === null) return;
    freeze(at);
    for (const fn of this.#fns) fn(state);
  }

  #shown(at, nothing) {
    const iso = new Date(at).toISOString();
    this.#hour = Math.floor(at / 3_600_000) * 3_600_000;
    this.#bar.querySelector("[data-past-at]").textContent = local(iso);
    this.#bar.querySelector("[data-past-slider]").value = Math.floor((at - this.#hour) / STEP_MS);
    this.#bar.classList.toggle("nothing", nothing);
    this.#bar.querySelector("[data-past-grain]").textContent = nothing ? "nothing was recorded here" : "";
    const address = new URL(location.href);
    address.searchParams.set("at", iso);
    history.replaceState(null, "", address);
  }
}
