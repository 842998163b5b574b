// The rollout page follows its topic: a frame that changed something asks the server for the moving part again, at most
// twice a second. Without a socket the part asks by itself every few seconds.
import { LiveSocket } from "/static/flexband/js/socket.js";

const EVERY_MS = 500;
const topic = document.querySelector("[data-topic^='rollout:']")?.dataset.topic;
let last = "", due = 0;

function moved() {
  due = 0;
  document.body.dispatchEvent(new CustomEvent("rollout-moved"));
}

if (topic) {
  const live = new LiveSocket("/ws/live/");
  live.on(topic, ({ at, ...state }) => {
    const now = JSON.stringify(state);
    if (last && now !== last) due ||= setTimeout(moved, EVERY_MS);
    last = now;
  });
  live.open();
}
