// The live socket. Subscribes topics, takes snapshot and delta frames, notices gaps, reconnects, pauses, slows down.
//
//   const live = new LiveSocket("/ws/live/");
//   live.on("pool:chat", (state, meta) => {...});   // state: merged data; meta: {topic, epoch, seq, at}
//   live.open();
//
// Rules: a delta is taken only in the epoch of its snapshot and with the next seq; anything else asks for a snapshot.
import { learnClock, serverNow } from "./ages.js";
import { say, toast } from "./announce.js";
import { local } from "./times.js";

const BANNER_AFTER_MS = 3000;
const BACKOFF_MS = [500, 1000, 2000, 4000, 8000, 15000];
const HIDDEN_EVERY_MS = 10000;
const SILENT_AFTER_MS = 30000;

export class LiveSocket extends EventTarget {
  #url; #socket = null; #topics = new Map(); #tries = 0; #timer = 0; #bannerTimer = 0; #closed = true;
  #paused = false; #lastFrameAt = null; #heard = 0; #watch = 0; #flushTimer = 0; #quietAfterMs;

  /** `quietAfterMs`: of topics that are told all the time; without news for so long the mark in the bar says so. */
  constructor(path = "/ws/live/", { quietAfterMs = Infinity } = {}) {
    super();
    this.#quietAfterMs = quietAfterMs;
    this.#url = new URL(path, location.href);
    this.#url.protocol = this.#url.protocol === "https:" ? "wss:" : "ws:";
    document.addEventListener("visibilitychange", () => document.hidden || this.#flush());
    document.addEventListener("click", (event) => event.target.closest("[data-pause-live]") && this.toggle());
  }

  /** Call fn(state, meta) on every accepted frame of a topic. Returns a function that ends it. */
  on(topic, fn) {
    if (!this.#topics.has(topic)) {
      this.#topics.set(topic, { state: null, epoch: null, seq: -1, at: null, fns: new Set(), dirty: false, asked: false });
      this.#ask([topic]);
    }
    this.#topics.get(topic).fns.add(fn);
    return () => this.#topics.get(topic)?.fns.delete(fn);
  }

  open() {
    this.#closed = false;
    this.#connect();
    this.#watch ||= setInterval(() => this.#checkSilence(), 5000);
    this.#show();
    return this;
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    clearTimeout(this.#bannerTimer);
    clearInterval(this.#watch);
    this.#watch = 0;
    this.#socket?.close();
  }

  get paused() { return this.#paused; }
  get lastFrameAt() { return this.#lastFrameAt; }

  /** Pause: frames are kept, nothing on the page moves. Resume shows the latest state. */
  toggle() {
    this.#paused = !this.#paused;
    say(this.#paused ? "Updates paused" : "Updates on");
    this.#show();
    if (!this.#paused) this.#flush();
  }

  #connect() {
    clearTimeout(this.#timer);
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    socket.onopen = () => {
      this.#tries = 0;
      this.#heard = Date.now();
      if (this.#topics.size) this.#ask([...this.#topics.keys()]);
      else this.#disarmBanner();
    };
    socket.onmessage = (event) => this.#receive(event.data);
    socket.onclose = () => socket === this.#socket && this.#lost();
    this.#armBanner();
  }

  #lost() {
    this.#socket = null;
    if (this.#closed) return;
    for (const topic of this.#topics.values()) topic.asked = false;
    this.#armBanner();
    const base = BACKOFF_MS[Math.min(this.#tries++, BACKOFF_MS.length - 1)];
    this.#timer = setTimeout(() => this.#connect(), base / 2 + Math.random() * base);
  }

  #state() {
    if (this.#paused) return "paused";
    return this.#lastFrameAt && serverNow() - Date.parse(this.#lastFrameAt) > this.#quietAfterMs ? "quiet" : "live";
  }

  #checkSilence() {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#show();
    // A half-open connection says nothing for ever. Subscribing again makes a live one answer.
    if (this.#socket?.readyState !== WebSocket.OPEN || !this.#topics.size) return;
    const quiet = Date.now() - this.#heard;
    if (quiet > 2 * SILENT_AFTER_MS) this.#socket.close();
    else if (quiet > SILENT_AFTER_MS) this.#ask([...this.#topics.keys()]);
  }

  #ask(topics) {
    if (this.#socket?.readyState !== WebSocket.OPEN || !topics.length) return;
    for (const name of topics) this.#topics.get(name).asked = true;
    this.#socket.send(JSON.stringify({ subscribe: topics }));
  }

  #receive(text) {
    let frame;
    try {
      frame = JSON.parse(text);
    } catch {
      return;
    }
    this.#heard = Date.now();
    const topic = this.#topics.get(frame.topic);
    if (!topic) return;
    if (frame.type === "error") {
      this.dispatchEvent(new CustomEvent("refused", { detail: frame }));
      return toast(`${frame.topic}: ${frame.detail}`);
    }
    if (frame.type === "snapshot") topic.state = frame.data;
    else if (frame.type === "delta" && topic.state !== null && frame.epoch === topic.epoch && frame.seq <= topic.seq) return;
    else if (frame.type === "delta" && topic.state !== null && frame.epoch === topic.epoch && frame.seq === topic.seq + 1) {
      topic.state = { ...topic.state, ...frame.data };
    } else if (frame.type === "delta") {
      topic.state = null;
      if (!topic.asked) this.#ask([frame.topic]);
      return;
    } else return;
    Object.assign(topic, { epoch: frame.epoch, seq: frame.seq, at: frame.at, dirty: true, asked: false });
    learnClock(frame.at);
    this.#lastFrameAt = frame.at;
    this.#disarmBanner();
    this.#schedule();
  }

  #schedule() {
    if (this.#paused) return;
    if (!document.hidden) return this.#flush();
    this.#flushTimer ||= setTimeout(() => this.#flush(), HIDDEN_EVERY_MS);
  }

  #flush() {
    clearTimeout(this.#flushTimer);
    this.#flushTimer = 0;
    if (this.#paused) return;
    for (const [name, topic] of this.#topics) {
      if (!topic.dirty || topic.state === null) continue;
      topic.dirty = false;
      const meta = { topic: name, epoch: topic.epoch, seq: topic.seq, at: topic.at };
      for (const fn of topic.fns) {
        try {
          fn(topic.state, meta);
        } catch (error) {
          console.error(error);
        }
      }
    }
    this.#show();
  }

  #armBanner() {
    this.#bannerTimer ||= setTimeout(() => {
      const since = this.#lastFrameAt ? ` Last update ${local(this.#lastFrameAt)}.` : " Figures are those of the page's start.";
      this.#banner(`Connection lost, trying again.${since} Agents go on by themselves.`);
      this.#show("lost");
    }, BANNER_AFTER_MS);
  }

  #disarmBanner() {
    clearTimeout(this.#bannerTimer);
    this.#bannerTimer = 0;
    const box = document.getElementById("connection-banner");
    if (box && !box.hidden) {
      box.hidden = true;
      box.textContent = "";
      say("Connected again");
    }
  }

  #banner(text) {
    const box = document.getElementById("connection-banner");
    if (!box) return;
    box.textContent = text;
    box.hidden = false;
  }

  /** The mark in the bar: [data-live-mark] with a <b data-live-time> and the [data-pause-live] button. */
  #show(state = this.#state()) {
    for (const mark of document.querySelectorAll("[data-live-mark]")) {
      mark.dataset.state = state;
      const word = mark.querySelector("[data-live-word]");
      if (word) word.textContent = { live: "Live", paused: "Paused", lost: "Connection lost", quiet: "Stale" }[state];
      const time = mark.querySelector("[data-live-time]");
      if (time && this.#lastFrameAt) time.textContent = local(this.#lastFrameAt);
    }
    for (const button of document.querySelectorAll("[data-pause-live]")) {
      button.textContent = this.#paused ? "Resume" : "Pause";
      button.setAttribute("aria-pressed", String(this.#paused));
    }
  }
}

export { serverNow };
