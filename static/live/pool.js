import { update } from "/static/flexband/js/charts.js";
import { livePage } from "/static/live/page.js";

const root = document.querySelector("[data-live-topic]");
let latest = null;

function chosen() {
  return document.querySelector("[name=percentile]:checked")?.value ?? "p95";
}

/** The figure of the chosen percentile; the page arrives with that of p95. */
function draw() {
  const figures = latest ?? JSON.parse(document.getElementById("stage-figures").textContent);
  const figure = figures[`stack_${chosen()}`];
  if (figure) update("stages", figure.data, figure.layout);
}

for (const input of document.querySelectorAll("[name=percentile]")) {
  input.addEventListener("change", () => {
    document.getElementById("stages").dataset.q = chosen();
    draw();
  });
}

function showFlex() {
  const name = document.querySelector("[name=flex]:checked")?.value;
  for (const entry of document.querySelectorAll("[data-flex]")) entry.hidden = name !== undefined && entry.dataset.flex !== name;
}
for (const input of document.querySelectorAll("[name=flex]")) input.addEventListener("change", showFlex);
showFlex();

livePage(root.dataset.liveTopic, (state, before) => {
  latest = state;
  const key = `stack_${chosen()}`;
  if (state[key] !== before?.[key]) draw();
  for (const [id, name] of [["engine-memory", "memory_figure"], ["engine-running", "running_figure"]]) {
    if (state[name] && state[name] !== before?.[name]) update(id, state[name].data, state[name].layout);
  }
  showFlex();
});
